"""One-line faults of the core, each with the cheapest tests that have to find it.

`test_mutants.py` plants them one by one in a copy of the sources. A fault that no test finds is a
test that is missing.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault: `old`, which stands once in `file`, becomes `new`; one of `tests` has to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # node ids below tests/, separated by spaces


TREE = "jaxspec/tree.py"
VERIFY = "jaxspec/verify.py"
SAMPLE = "jaxspec/sample.py"
CACHE = "jaxspec/cache.py"
STATE = "jaxspec/state.py"
STEP = "jaxspec/step.py"
ENGINE = "jaxspec/engine.py"
SHAPES = "jaxspec/shapes.py"
ANSWER = "jaxspec/answer.py"
GROW = "jaxspec/draft/grow.py"
DRAFT = "jaxspec/draft/mtp.py"
ATTENTION = "jaxspec/model/attention.py"
BASIC = "jaxspec/model/basic.py"
COMPRESS = "jaxspec/model/compress.py"
LAYOUT = "jaxspec/model/layout.py"
MOE = "jaxspec/model/moe.py"
DENSE = "pallas_kernels/tree_attention/ref.py"
DENSE_CPU = "pallas_kernels/tree_attention/cpu.py"
INDEX = "pallas_kernels/index_topk/ref.py"
INDEX_CPU = "pallas_kernels/index_topk/cpu.py"
EXPERTS = "pallas_kernels/grouped_matmul/ref.py"
EXPERTS_CPU = "pallas_kernels/grouped_matmul/cpu.py"
MIXING = "pallas_kernels/hyper_mixing/ref.py"
MIXING_TPU = "pallas_kernels/hyper_mixing/tpu.py"
HYPER = "jaxspec/model/hyper.py"
CLUSTER = "pallas_kernels/tree_attention/gpu_cluster.py"
EXCHANGE = "pallas_kernels/index_topk/gpu_exchange.py"
INDEX_PLAN = "pallas_kernels/index_topk/gpu_plan.py"
FORMS = "pallas_kernels/tree_attention/forms.py"

WALKS = "test_verify.py::test_walk_follows_matching_live_children"
NARROWING = "test_narrowing.py::test_narrowing_equals_sorting"
NOISE = "test_sample.py::test_noise_depends_on_seed_and_position_alone"
RANKS = "test_answer.py::test_ranks_and_depths_are_those_of_plain_walks"
STREAMS = "test_step.py::test_every_drafter_gives_the_stream_of_plain_decoding"
PLAINLY = "test_step.py::test_plain_decoding_is_the_loop_on_the_host"
EMITS = "test_step.py::test_a_step_emits_the_path_that_plain_decoding_takes"
LOSSLESS = "test_lossless.py::test_any_draft_gives_the_stream_and_the_state_of_plain_decoding"
COMPILES = "test_one_program.py::test_a_run_compiles_each_phase_once_and_the_next_runs_nothing"
MOVES = "test_one_writer.py::test_extend_moves_numbers_and_computes_none"
COMMITS = "test_laws.py::test_a_commit_writes_the_accepted_rows_and_nothing_else"
CHUNKS = "test_golden.py::test_in_chunks"
NODES = "test_golden.py::test_as_trees_of_one_node"
TREES = "test_tree_verify.py::test_every_node_of_random_trees_equals_its_serial_decoding"
SELECTS = "test_grow.py::test_select_is_best_first"
GROWS = "test_grow.py::test_growth_is_a_beam_of_path_scores"
ENDS = "test_grow.py::test_what_cannot_enter_a_tree_does_not_grow_and_is_not_missed"
WAITS = "test_engine.py::test_the_device_knows_what_waits_and_what_a_stop_string_ended"
RAISES = "test_engine.py::test_a_callback_that_raises_leaves_an_engine_that_decodes"
ROOM = "test_shapes.py::test_there_is_room_for_every_request_and_little_more"
OBSERVES = "test_mtp_drafter.py::test_observing_a_path_is_running_its_rows_singly"
DRAFTS = "test_mtp_drafter.py::test_scores_of_a_draft_are_those_of_its_paths_run_one_by_one"
LARGEST = (
    "pallas_kernels/test_index_topk.py::test_the_largest_are_chosen_and_of_equal_ones_the_first"
)
INDEXES = "pallas_kernels/test_index_topk.py::test_each_node_selects_its_best_visible_entries"
LONG_CHAINS = (
    "pallas_kernels/test_tree_attention_cpu.py::"
    "test_a_chain_longer_than_the_window_agrees_with_the_definition"
)
OF_STREAMS = "test_operations.py::test_streams_are_collected_and_spread_by_their_weights"
TRAINS = "test_train.py::test_training_takes_what_has_gradients"
JOINS = "pallas_kernels/test_gpu_cluster.py::test_blocks_join_between_two_barriers"
COUNTS = (
    "pallas_kernels/test_gpu_exchange.py::test_all_who_share_a_node_learn_the_sums_of_all_blocks"
)
MIXES = "pallas_kernels/test_hyper_mixing.py::test_tpu"
PLACES = "pallas_kernels/test_index_topk_gpu.py::test_every_entry_has_one_place"
PAIRS = "pallas_kernels/test_grouped_matmul.py::test_equals_a_loop_over_pairs"

_TREES_AND_CHOICES = (
    Mutant(
        "mask by index",
        TREE,
        "mask = index[:, None] == index\n",
        "mask = index[:, None] >= index\n",
        "test_tree.py::test_ancestor_mask_is_the_walk_up",
    ),
    Mutant(
        "ancestors one round short",
        TREE,
        "range((index.size - 1).bit_length())",
        "range((index.size - 1).bit_length() - 1)",
        "test_tree.py::test_deepest_chain_reaches_its_root",
    ),
    Mutant(
        "lineage knows one ancestor too many",
        TREE,
        "return index, wanted >= 0",
        "return index, wanted >= -1",
        "test_tree.py::test_lineage_lists_the_nearest_ancestors",
    ),
    Mutant(
        "position by index",
        TREE,
        "position=length[:, None] + mask.sum(-1, dtype=jnp.int32) - 1,",
        "position=length[:, None] + jnp.arange(tree.token.shape[1], dtype=jnp.int32),",
        "test_tree.py::test_tree_block",
    ),
    Mutant(
        "ancestor bits one off",
        TREE,
        "(bits << jnp.arange(WORD, dtype=jnp.uint32)).sum",
        "(bits << (jnp.arange(WORD, dtype=jnp.uint32) + 1) % WORD).sum",
        "test_tree.py::test_packing_is_little_endian_and_reversible",
    ),
    Mutant(
        "one token of padding is valid",
        TREE,
        "valid=step < jnp.asarray",
        "valid=step <= jnp.asarray",
        "test_tree.py::test_chain_block_counts_its_leading_tokens",
    ),
    Mutant(
        "a draft is compared with its own choice",
        VERIFY,
        "(tree.token == choice[up])",
        "(tree.token == choice)",
        WALKS,
    ),
    Mutant("bonus of the last place", VERIFY, "choice[path[count - 1]]", "choice[path[-1]]", WALKS),
    Mutant("dead drafts are accepted", VERIFY, "match = tree.live & (tree", "match = (tree", WALKS),
    Mutant(
        "highest of equal siblings",
        VERIFY,
        "(index[:, None] > index)",
        "(index[:, None] < index)",
        "test_verify.py::test_lowest_of_equal_siblings_is_followed",
    ),
    Mutant(
        "walk one round short",
        VERIFY,
        "range((index.size - 1).bit_length())",
        "range((index.size - 1).bit_length() - 1)",
        f"{WALKS} test_verify.py::test_chain_accepts_its_common_prefix",
    ),
    Mutant(
        "path as long as the tree is deep",
        VERIFY,
        "levels=depth + 1)",
        "levels=max(depth, 1))",
        "test_verify.py::test_declared_depth_bounds_the_path",
    ),
    Mutant(
        "end token is cut off",
        VERIFY,
        "jnp.argmax(is_end, axis=1) + 1, token",
        "jnp.argmax(is_end, axis=1), token",
        STREAMS,
    ),
    Mutant(
        "bonus one place late",
        VERIFY,
        "== result.count[:, None] - 1\n",
        "== result.count[:, None]\n",
        STREAMS,
    ),
    Mutant(
        "rank counts later siblings",
        VERIFY,
        "(index[:, None] >= index)",
        "(index[:, None] <= index)",
        RANKS,
    ),
    Mutant(
        "bonus counts as drafted",
        VERIFY,
        "is_drafted = place < result.count[:, None] - 1",
        "is_drafted = place < result.count[:, None]",
        RANKS,
    ),
    Mutant(
        "noise of p at p + 1",
        SAMPLE,
        "position = first[:, None] + jnp",
        "position = first[:, None] - 1 + jnp",
        "test_sample.py::test_shared_noise_is_the_nodes_own",
    ),
    Mutant(
        "noise by slot",
        SAMPLE,
        "return rows(jnp.asarray(seed, jnp.uint32)",
        "return rows(jnp.arange(len(seed), dtype=jnp.uint32)",
        NOISE,
    ),
    Mutant(
        "noise by row",
        SAMPLE,
        "jnp.asarray(position, jnp.int32))",
        "jnp.zeros_like(position) + jnp.arange(position.shape[1]))",
        NOISE,
    ),
    Mutant(
        "greedy flag of the first row",
        SAMPLE,
        "jnp.where(sampling.greedy[:, None, None], scores",
        "jnp.where(sampling.greedy[0], scores",
        "test_sample.py::test_rows_do_not_influence_each_other",
    ),
    Mutant(
        "masked by -inf",
        SAMPLE,
        "MASKED = float(np.finfo(np.float32).min)",
        "MASKED = -float(np.inf)",
        "test_narrowing.py::test_scores_are_finite_for_extreme_logits",
    ),
    Mutant(
        "one token too many",
        SAMPLE,
        "earlier * share < need)",
        "earlier * share <= need)",
        "test_narrowing.py::test_edges_of_top_k_and_top_p",
    ),
    Mutant(
        "a token counts as earlier than itself",
        SAMPLE,
        "dtype=jnp.int32) - tie",
        "dtype=jnp.int32)",
        "test_narrowing.py::test_edges_of_top_k_and_top_p",
    ),
    Mutant(
        "top-k of 1 is off",
        SAMPLE,
        "jnp.where(sampling.top_k > 0,",
        "jnp.where(sampling.top_k > 1,",
        "test_narrowing.py::test_edges_of_top_k_and_top_p",
    ),
    Mutant(
        "nucleus of all tokens, not of the k best",
        SAMPLE,
        "inf, mass), jax.nn.softmax)",
        "inf, mass), lambda _: jax.nn.softmax(scores))",
        NARROWING,
    ),
    Mutant(
        "dead root is accepted",
        VERIFY,
        "match.at[0].set(tree.live[0])",
        "match.at[0].set(True)",
        WALKS,
    ),
    Mutant(
        "dead children count as offered",
        VERIFY,
        "((index[:, None] == other) & tree.live[:, None])",
        "(index[:, None] == other)",
        RANKS,
    ),
    Mutant(
        "dead siblings take a rank",
        VERIFY,
        "(node == other) & tree.live[:, None] &",
        "(node == other) &",
        RANKS,
    ),
    Mutant(
        "bonus of before the cut",
        VERIFY,
        "last = jnp.maximum(count - 1, 0)[:, None]",
        "last = jnp.maximum(result.count - 1, 0)[:, None]",
        STREAMS,
    ),
    Mutant(
        "margin looks at one side of a nucleus",
        SAMPLE,
        "choose_at(1 - BOUNDARY)",
        "choose_at(1 + BOUNDARY)",
        "test_narrowing.py::test_a_margin_is_zero_where_a_nucleus_by_a_hair_wider_or_narrower_chooses_otherwise",
    ),
)

_DRAFTING = (
    Mutant(
        "children at the node before",
        GROW,
        "NO_PARENT, 0, above)",
        "NO_PARENT, 0, above - 1)",
        SELECTS,
    ),
    Mutant("tree places from 0", GROW, "node = 1 + jnp.argsort", "node = jnp.argsort", SELECTS),
    Mutant("worst first", GROW, "jnp.where(live, -score", "jnp.where(live, score", SELECTS),
    Mutant(
        "score of the edge alone",
        GROW,
        "front.score[:, :given, None] + jnp.minimum",
        "jnp.minimum",
        GROWS,
    ),
    Mutant(
        "parent slot by rank",
        GROW,
        "(order // candidates.top_k)",
        "(order % candidates.top_k)",
        "test_grow.py::test_frontier_knows_where_its_parents_stood",
    ),
    Mutant(
        "frontier of an old level",
        GROW,
        "start = (candidates.level - 1) * block",
        "start = jnp.maximum(candidates.level - 2, 0) * block",
        GROWS,
    ),
    Mutant(
        "frontier one node short",
        GROW,
        "(before.sum(-1) < budget - 1)",
        "(before.sum(-1) < budget - 2)",
        ENDS,
    ),
    Mutant(
        "ties are not before",
        GROW,
        "candidates.live[:, None] & (higher | (equal & earlier))",
        "candidates.live[:, None] & higher",
        ENDS,
    ),
    Mutant(
        "draft ends a level early",
        DRAFT,
        "(self.grown.level < levels)",
        "(self.grown.level < levels - 1)",
        DRAFTS,
    ),
    Mutant(
        "draft goes on for sequences that are done",
        DRAFT,
        "jnp.any(self.front.live & live[:, None])",
        "jnp.any(self.front.live)",
        "test_mtp_drafter.py::test_a_draft_ends_where_no_sequence_needs_another_level",
    ),
    Mutant(
        "norms of the draft's two inputs swapped",
        "jaxspec/model/mtp.py",
        "rms_norm(embedding, p.enorm,",
        "rms_norm(embedding, p.hnorm,",
        "test_golden.py::test_in_chunks",
    ),
    Mutant(
        "noise one level short",
        STEP,
        "drafter.depth + 1, cfg.vocab_size)",
        "drafter.depth, cfg.vocab_size)",
        "test_step.py::test_a_step_emits_the_path_that_plain_decoding_takes",
    ),
    Mutant(
        "room for one entry less",
        CACHE,
        "capacity = max(max_len // ratio, 1)",
        "capacity = max(max_len // ratio - 1, 1)",
        "test_laws.py::test_a_cache_may_be_filled_to_its_last_place",
    ),
    Mutant(
        "sharpened without its sum",
        GROW,
        "logsumexp(sharpness * scores",
        "logsumexp(scores",
        GROWS,
    ),
    Mutant(
        "dead rows draft",
        GROW,
        "candidates.live & live[:, None]",
        "candidates.live",
        "test_grow.py::test_sequence_that_does_not_draft_has_no_live_node",
    ),
    Mutant(
        "drafted streams are observed",
        DRAFT,
        "else _take(features, result.path)",
        "else _take(state.streams[:, None] + 0 * features, result.path)",
        OBSERVES,
    ),
    Mutant(
        "streams by place, not by node",
        DRAFT,
        "else _take(features, result.path)",
        "else features[:, : result.path.shape[1]]",
        OBSERVES,
    ),
    Mutant(
        "streams of the first row are kept",
        DRAFT,
        "last_valid(rows, out.streams)[:, 0]",
        "out.streams[:, 0]",
        OBSERVES,
    ),
    Mutant(
        "draft rows one position late",
        DRAFT,
        "length[:, None] + depth - 1,",
        "length[:, None] + depth,",
        DRAFTS,
    ),
    Mutant(
        "ancestors of the slot, not of the parent",
        DRAFT,
        "_take(drafted.seen, front.parent_slot)",
        "drafted.seen",
        DRAFTS,
    ),
    Mutant(
        "draft noise one position early",
        DRAFT,
        "block.position + 2)",
        "block.position + 1)",
        DRAFTS,
    ),
    Mutant(
        "children that cannot be chosen are drafted",
        GROW,
        "front.live[:, :given, None] & (best > MASKED / 2)",
        "front.live[:, :given, None] & (best > 2 * MASKED)",
        GROWS,
    ),
    Mutant(
        "frontier index within its level",
        GROW,
        "(start + order).astype(jnp.int32)",
        "order.astype(jnp.int32)",
        GROWS,
    ),
    Mutant(
        "streams of what does not move change",
        DRAFT,
        "streams=jnp.where(moved, last, state.streams)",
        "streams=last",
        OBSERVES,
    ),
    Mutant(
        "scratch holds one row a level",
        ATTENTION,
        "start=self.start + kv.shape[1]",
        "start=self.start + 1",
        DRAFTS,
    ),
    Mutant(
        "sequences that are done draft through experts",
        DRAFT,
        "valid=front.live & live[:, None]",
        "valid=front.live",
        "test_mtp_drafter.py::test_a_sequence_that_is_not_live_reaches_no_expert",
    ),
)

_STATE = (
    Mutant(
        "a commit scales its rows",
        CACHE,
        'kv[path[jnp.maximum(depth, 0)]], mode="drop"',
        'kv[path[jnp.maximum(depth, 0)]] * 1, mode="drop"',
        MOVES,
    ),
    Mutant(
        "a commit narrows its entries",
        CACHE,
        "store.at[place].set(new[row]",
        "store.at[place].set(new[row].astype(jnp.bfloat16)",
        MOVES,
    ),
    Mutant(
        "ring slot one off",
        CACHE,
        "(length + depth) % window",
        "(length + depth + 1) % window",
        COMMITS,
    ),
    Mutant(
        "ring rows by depth, not by node",
        CACHE,
        "kv[path[jnp.maximum(depth, 0)]]",
        "kv[jnp.maximum(depth, 0)]",
        COMMITS,
    ),
    Mutant(
        "ring row of the node after",
        CACHE,
        "path[jnp.maximum(depth, 0)]",
        "path[jnp.minimum(jnp.maximum(depth, 0) + 1, path.shape[0] - 1)]",
        COMMITS,
    ),
    Mutant(
        "open state after one more node",
        CACHE,
        "last = path[jnp.maximum(count - 1, 0)]",
        "last = path[jnp.minimum(count, path.shape[0] - 1)]",
        COMMITS,
    ),
    Mutant(
        "entry of a node that was not accepted",
        CACHE,
        "accepted = depth < count",
        "accepted = depth <= count",
        COMMITS,
    ),
    Mutant(
        "committing nothing changes the open state",
        CACHE,
        "jnp.where(count > 0, new",
        "jnp.where(count >= 0, new",
        "test_laws.py::test_committing_nothing_is_the_identity",
    ),
    Mutant(
        "emit writes past the count",
        STATE,
        "jnp.where(step < count[:, None]",
        "jnp.where(step <= count[:, None]",
        f"{EMITS} {STREAMS}",
    ),
    Mutant(
        "one token beyond the limit",
        STATE,
        "(total >= state.limit)",
        "(total > state.limit)",
        PLAINLY,
    ),
    Mutant(
        "insert into the first slot",
        STATE,
        "(whole, one[0], slot, axis=0)",
        "(whole, one[0], slot * 0, axis=0)",
        "test_step.py::test_an_inserted_sequence_goes_on_as_alone",
    ),
    Mutant(
        "step chooses with the noise of its own position",
        STEP,
        "state.seed, block.position + 1)",
        "state.seed, block.position)",
        STREAMS,
    ),
    Mutant(
        "step's noise begins at the root",
        STEP,
        "state.seed, length + 1, drafter",
        "state.seed, length, drafter",
        STREAMS,
    ),
    Mutant(
        "first token's noise one late",
        STEP,
        "state, block.length + count)",
        "state, block.length + count + 1)",
        PLAINLY,
    ),
    Mutant(
        "a prompt that fills its chunks never ends",
        STEP,
        "(start + chunk >= valid)",
        "(start + chunk > valid)",
        "test_step.py::test_prefill_in_chunks_of_any_size",
    ),
    Mutant(
        "room for one more",
        STEP,
        "state.limit - state.count)",
        "state.limit - state.count + 1)",
        STREAMS,
    ),
    Mutant(
        "sequences that are done go on",
        STEP,
        "live=~state.done, score",
        "live=state.done | True, score",
        STREAMS,
    ),
    Mutant(
        "refill sees what was done before",
        STEP,
        "jnp.any(state.done & ~held)",
        "jnp.any(state.done)",
        "test_step.py::test_the_loop_is_so_many_steps_and_a_refill_ends_it",
    ),
    Mutant(
        "margin by place, not by node",
        STEP,
        "jnp.take_along_axis(gap, result.path, axis=1)",
        "gap[:, : result.path.shape[1]]",
        EMITS,
    ),
    Mutant(
        "first nodes of the block are committed",
        STEP,
        "cache = extend(state.cache, verified.rows, result.path, result.count)",
        "path = 0 * result.path + jnp.arange(result.path.shape[1])\n"
        "    cache = extend(state.cache, verified.rows, path, result.count)",
        LOSSLESS,
    ),
    Mutant(
        "refill is static",
        ENGINE,
        'jit(generate, static_argnames=("cfg", "drafter", "impl")',
        'jit(generate, static_argnames=("cfg", "drafter", "impl", "refill")',
        COMPILES,
    ),
    Mutant(
        "capacity follows the prompts",
        SHAPES,
        "run.max_len or round_up(needed, ROUND)",
        "run.max_len or needed",
        COMPILES,
    ),
    Mutant(
        "refill of another slot",
        ENGINE,
        "self._prefill(slots[slot], shapes), slot)",
        "self._prefill(slots[slot], shapes), len(slots) - 1 - slot)",
        "test_engine.py::test_a_request_gets_the_same_in_any_batch_slot_and_order",
    ),
    Mutant(
        "a step for slots whose answers ended in prefill",
        ENGINE,
        "if not (filled and waiting and np.asarray(state.done).any()):",
        "if True:",
        "test_engine.py::test_a_slot_whose_answer_ends_in_prefill_is_filled_again_at_once",
    ),
    Mutant(
        "last place of the capacity is refused",
        ENGINE,
        "length + limit - 1 > capacity",
        "length + limit > capacity",
        "test_engine.py::test_the_capacity_is_used_to_its_last_place",
    ),
    Mutant(
        "top-k and top-p of the run are dropped",
        ENGINE,
        "                top_k=run.top_k,\n                top_p=run.top_p,\n",
        "",
        "test_engine.py::test_the_runs_top_k_and_top_p_are_obeyed",
    ),
    Mutant(
        "every method drafts a chain",
        ENGINE,
        'TreeShape.tree if run.method == "tree" else TreeShape.chain',
        "TreeShape.chain",
        "test_mtp_drafter.py::test_method_and_budget_choose_the_drafter",
    ),
    Mutant(
        "children of the root are not sharpened",
        DRAFT,
        "expand(grown, first, scores, sharpness=shape.sharpness)",
        "expand(grown, first, scores)",
        DRAFTS,
    ),
    Mutant(
        "children below the root are not sharpened",
        DRAFT,
        "expand(drafted.grown, front, scores, sharpness=shape.sharpness)",
        "expand(drafted.grown, front, scores)",
        DRAFTS,
    ),
    Mutant(
        "budget without its root",
        ENGINE,
        "grow(int(run.budget))",
        "grow(int(run.budget) + 1)",
        "test_mtp_drafter.py::test_method_and_budget_choose_the_drafter",
    ),
    Mutant(
        "what a stop string ended goes on",
        ENGINE,
        "jnp.asarray([held is None for held in slots])",
        "state.done",
        WAITS,
    ),
    Mutant("free slots wait for a look", ENGINE, "refill=bool(waiting)", "refill=False", WAITS),
    Mutant("the last request comes first", ENGINE, "waiting.popleft()", "waiting.pop()", WAITS),
    Mutant(
        "cache in float32",
        ENGINE,
        "dtype=self.params.embed.dtype",
        "dtype=jnp.float32",
        "test_engine.py::test_the_cache_has_the_type_of_the_parameters",
    ),
    Mutant(
        "two calls at once",
        ENGINE,
        "if not self._decoding.acquire(blocking=False):",
        "if self._decoding.acquire(blocking=False) is None:",
        "test_engine.py::test_an_engine_that_decodes_refuses_a_second_call_and_goes_on",
    ),
    Mutant(
        "a callback that raises ends the engine",
        ENGINE,
        "            self._decoding.release()",
        "            self._decoding.locked()",
        RAISES,
    ),
    Mutant(
        "requests that did not begin are counted",
        ANSWER,
        "for answer in answers if answer.tokens]",
        "for answer in answers]",
        RAISES,
    ),
    Mutant(
        "room for the run's own limit alone",
        SHAPES,
        "round_up(max(answer.limit for answer in answers), ROUND)",
        "round_up(run.max_new_tokens, ROUND)",
        ROOM,
    ),
    Mutant(
        "capacity one place short",
        SHAPES,
        "answer.limit - 1 for answer",
        "answer.limit - 2 for answer",
        ROOM,
    ),
    Mutant(
        "slots that no request needs",
        SHAPES,
        "min(run.batch_size, len(answers))",
        "run.batch_size",
        ROOM,
    ),
    Mutant(
        "forwards cost their tokens alone",
        SHAPES,
        "forwards * (chunk + CHUNK_COST)",
        "forwards * chunk",
        "test_shapes.py::test_the_chunk_is_the_cheapest_for_the_prompts",
    ),
    Mutant(
        "numbers are cut to integers",
        "jaxspec/requests.py",
        "return operator.index(value)",
        "return int(value)",
        "test_engine.py::test_one_bad_request_refuses_all_before_anything_is_decoded",
    ),
    Mutant(
        "trees end a level early",
        GROW,
        "TreeShape(budget, budget - 1, beam, beam,",
        "TreeShape(budget, max(budget - 2, 1), beam, beam,",
        "test_grow.py::test_a_tree_may_be_as_deep_as_the_chain_of_its_budget",
    ),
    Mutant(
        "every token counts as drafted",
        ANSWER,
        "news.rank[place] > 0",
        "news.rank[place] >= 0",
        RANKS,
    ),
    Mutant("offered one less", ANSWER, "sum(offered >= rank", "sum(offered > rank", RANKS),
    Mutant("reached one more", ANSWER, "sum(drafted > level", "sum(drafted >= level", RANKS),
    Mutant(
        "limit above the places of the output",
        STATE,
        "limit=jnp.minimum(jnp.asarray(limit, jnp.int32), max_new)",
        "limit=jnp.asarray(limit, jnp.int32)",
        "test_step.py::test_a_limit_is_no_more_than_the_output_has_places",
    ),
    Mutant(
        "token after a chunk is its last",
        STEP,
        "chosen.token[:, 0], piece[:, -1])",
        "chosen.token[:, 0], piece[:, -2])",
        "test_step.py::test_prefill_in_chunks_of_any_size",
    ),
    Mutant(
        "prefill counts as a step",
        ANSWER,
        "                if not is_first:",
        "                if step:",
        RANKS,
    ),
)

_MODEL = (
    Mutant(
        "no inverse rotation",
        BASIC,
        "sin = -sin if inverse else sin",
        "sin = +sin if inverse else sin",
        "test_operations.py::test_turning_back_gives_what_was_turned",
    ),
    Mutant(
        "rotation of the leading dims",
        BASIC,
        "[(plain, 0)]",
        "[(0, plain)]",
        "test_operations.py::test_turning_back_gives_what_was_turned",
    ),
    Mutant(
        "YaRN on sliding layers",
        BASIC,
        "if not compressed:",
        "if cfg.yarn_factor == 1:",
        "test_operations.py::test_rotation_at_near_and_far_positions",
    ),
    Mutant(
        "one rotation for all layers",
        LAYOUT,
        "return self.folded if ratio else self.plain",
        "return self.folded",
        "test_operations.py::test_the_ratio_chooses_the_rotation",
    ),
    Mutant(
        "Sinkhorn once more",
        MIXING,
        "fori_loop(0, iterations - 1,",
        "fori_loop(0, iterations,",
        "test_operations.py::test_sinkhorn_step_by_step",
    ),
    Mutant(
        "Sinkhorn's first step over rows",
        MIXING,
        "mix = mix / (mix.sum(-2,",
        "mix = mix / (mix.sum(-1,",
        "test_operations.py::test_sinkhorn_step_by_step",
    ),
    Mutant(
        "bias in the weight",
        MOE,
        "take_along_axis(affinity, expert",
        "take_along_axis(affinity + (p.bias if p.table is None else 0), expert",
        "test_operations.py::test_routing_by_hand",
    ),
    Mutant(
        "token table by row",
        MOE,
        "expert = p.table[token]",
        "expert = p.table[jnp.arange(len(token))]",
        "test_operations.py::test_routing_by_hand",
    ),
    Mutant(
        "gate is not clamped",
        MOE,
        "jnp.minimum(project_float32(x, p.w1), limit)",
        "project_float32(x, p.w1)",
        "test_operations.py::test_gated_mlp_clamps_its_halves",
    ),
    Mutant(
        "up is clamped from above alone",
        MOE,
        "jnp.clip(project_float32(x, p.w3), -limit, limit)",
        "jnp.minimum(project_float32(x, p.w3), limit)",
        "test_operations.py::test_gated_mlp_clamps_its_halves",
    ),
    Mutant(
        "padding reaches experts",
        MOE,
        "live=valid.reshape(-1)",
        "live=valid.reshape(-1) | True",
        "test_laws.py::test_padding_reaches_no_expert",
    ),
    Mutant(
        "entry rotated to its last token",
        COMPRESS,
        "rotation(cfg, entry * ratio,",
        "rotation(cfg, entry * ratio + ratio - 1,",
        NODES,
    ),
    Mutant(
        "stale pool after a window's end",
        COMPRESS,
        "opened = jnp.where(ends[..., None, None, None], shifted, slots)",
        "opened = slots",
        NODES,
    ),
    Mutant(
        "pools of a chunk's first windows stay",
        COMPRESS,
        "index = done[:, None] + jnp.arange(count)",
        "index = 0 * done[:, None] + jnp.arange(count)",
        CHUNKS,
    ),
    Mutant(
        "place in the window one off",
        COMPRESS,
        "p.ape[block.position % ratio]",
        "p.ape[(block.position + 1) % ratio]",
        NODES,
    ),
    Mutant(
        "overlapping halves swapped",
        LAYOUT,
        "jnp.clip(pools - 1 - ahead,",
        "jnp.clip(ahead,",
        NODES,
    ),
    Mutant(
        "padding feeds pools",
        LAYOUT,
        "known = take < valid",
        "known = take < tokens",
        "test_laws.py::test_tokens_beyond_the_valid_ones_feed_nothing",
    ),
    Mutant(
        "entry of a chunk one position early",
        ATTENTION,
        "seen = folded.owner[:, None] <= jnp.arange(nodes)[:, None]",
        "seen = folded.owner[:, None] <= jnp.arange(nodes)[:, None] + 1",
        CHUNKS,
    ),
    Mutant(
        "entries of a tree by index",
        ATTENTION,
        "seen = unpack_bits(block.ancestors, nodes)",
        "seen = jnp.tril(jnp.ones((nodes, nodes), bool))",
        TREES,
    ),
)

_KERNELS = (
    Mutant(
        "window one too wide",
        DENSE,
        "(slots > position[..., None] - window)",
        "(slots >= position[..., None] - window)",
        NODES,
    ),
    Mutant(
        "window of a long chunk one too narrow",
        DENSE_CPU,
        "(offset <= window)",
        "(offset < window)",
        CHUNKS,
    ),
    Mutant(
        "no sink",
        DENSE,
        "total, out = jnp.exp(sink[:, None] - top),",
        "total, out = 0 * top,",
        NODES,
    ),
    Mutant(
        "committed entry one position early",
        DENSE,
        "(committed.length // committed.ratio)",
        "((committed.length + 1) // committed.ratio)",
        NODES,
    ),
    Mutant(
        "rows of a tree by index",
        DENSE,
        "row_mask = bits(own.row_bits, rows)",
        "row_mask = jnp.tril(jnp.ones((q.shape[1], rows), bool))",
        TREES,
    ),
    Mutant(
        "one uncommitted entry is chosen from",
        INDEX,
        "jnp.arange(capacity) < entries",
        "jnp.arange(capacity) <= entries",
        INDEXES,
    ),
    Mutant(
        "chosen among what is not visible too",
        INDEX,
        "jnp.where(visible, jnp.concatenate(parts, axis=-1), LOWEST)",
        "jnp.concatenate(parts, axis=-1)",
        INDEXES,
    ),
    Mutant("scores without relu", INDEX, "(jax.nn.relu(dots) * weight", "(dots * weight", INDEXES),
    Mutant(
        "one tie too few",
        INDEX_CPU,
        "dtype=jnp.int32) <= room)",
        "dtype=jnp.int32) < room)",
        LARGEST,
    ),
    Mutant(
        "ties to the highest index",
        INDEX_CPU,
        "jnp.cumsum(tie, axis=-1, dtype=jnp.int32)",
        "jnp.cumsum(tie[..., ::-1], axis=-1, dtype=jnp.int32)[..., ::-1]",
        LARGEST,
    ),
    Mutant(
        "definition's up is clamped from above alone",
        EXPERTS,
        "jnp.clip(product(sorted_x, w3, sizes), -limit, limit)",
        "jnp.minimum(product(sorted_x, w3, sizes), limit)",
        PAIRS,
    ),
    Mutant(
        "tile of the expert before",
        EXPERTS_CPU,
        "jnp.sum(tiles.tile_stop <= i,",
        "jnp.sum(tiles.tile_stop < i,",
        PAIRS,
    ),
    Mutant(
        "pairs beyond the batch start over",
        EXPERTS_CPU,
        "tiles.start[expert] + batched + (i",
        "tiles.start[expert] + (i",
        "pallas_kernels/test_grouped_matmul.py::test_pairs_beyond_the_batched_product_are_in_tiles",
    ),
    Mutant(
        "last tile of an expert is dropped",
        EXPERTS_CPU,
        "-(-jnp.maximum(count - batched, 0) // size)",
        "jnp.maximum(count - batched, 0) // size",
        PAIRS,
    ),
    Mutant(
        "dead rows hold what they held",
        EXPERTS_CPU,
        "return jnp.where(live[:, None], pairs.sum(1), 0)",
        "return pairs.sum(1)",
        "pallas_kernels/test_grouped_matmul.py::test_dead_rows_are_zero_whatever_they_hold",
    ),
    Mutant(
        "committed entries only once every row has some",
        DENSE_CPU,
        "lax.cond(held.max() > 0",
        "lax.cond(held.min() > 0",
        LONG_CHAINS,
    ),
    Mutant(
        "float32 entries are held in words of bfloat16",
        FORMS,
        "if on_tpu and entries.dtype == jnp.bfloat16 and",
        "if on_tpu and",
        "test_entries.py::test_a_state_for_tpu_kernels_holds_words",
    ),
    Mutant(
        "a row's words have their halves swapped",
        "jaxspec/model/attention.py",
        "entry=alike(folded.entry, layer.entries),",
        "entry=alike(jnp.roll(folded.entry, folded.entry.shape[-1] // 2, -1), layer.entries)"
        " if not hasattr(layer.entries, 'shape') else folded.entry,",
        "test_entries.py::test_entries_in_words_are_those_of_a_plain_cache",
    ),
    Mutant(
        "first token falls out of the ring",
        DENSE_CPU,
        "jnp.arange(window) >= 0",
        "jnp.arange(window) > 0",
        LONG_CHAINS,
    ),
    Mutant(
        "zeros of both signs differ",
        INDEX_CPU,
        "jnp.where(scores == 0, 0, bits)",
        "bits + 0",
        LARGEST,
    ),
    Mutant(
        "gradient of a closed gate overflows",
        EXPERTS_CPU,
        "jnp.exp(jnp.minimum(-gate, 80.0))",
        "jnp.exp(-gate)",
        "pallas_kernels/test_grouped_matmul.py::test_a_closed_gate_has_a_finite_gradient",
    ),
    Mutant(
        "dead rows reach experts",
        EXPERTS_CPU,
        "key = jnp.where(live[:, None], expert, experts)",
        "key = jnp.where(True, expert, experts)",
        "pallas_kernels/test_grouped_matmul.py::test_dead_rows_are_in_no_tile",
    ),
)

_CLUSTERS_AND_STREAMS = (
    Mutant(
        "first stream is left out",
        HYPER,
        "for j in range(streams.shape[-2]))",
        "for j in range(1, streams.shape[-2]))",
        OF_STREAMS,
    ),
    Mutant(
        "streams mix by the transpose",
        HYPER,
        "mixing.mix[..., k])",
        "mixing.mix[..., k, :])",
        OF_STREAMS,
    ),
    Mutant(
        "sums over streams are reductions everywhere",
        HYPER,
        'return target_platform() == "cpu"',
        "return True",
        OF_STREAMS,
    ),
    Mutant(
        "mixing weights by a choice of their own",
        HYPER,
        "        impl=impl,\n",
        '        impl="auto",\n',
        TRAINS,
    ),
    Mutant(
        "training takes kernels",
        "jaxspec/model/backends.py",
        'return "auto" if target_platform() == "cpu" else "ref"',
        'return "auto"',
        TRAINS,
    ),
    Mutant(
        "exponentials of mixing logits overflow",
        MIXING_TPU,
        "jnp.exp(x - top)",
        "jnp.exp(x)",
        MIXES,
    ),
    Mutant(
        "every step mixes the first rows",
        MIXING_TPU,
        "lambda i: (0, i, 0)",
        "lambda i: (0, 0, 0)",
        MIXES,
    ),
    Mutant(
        "entries are words only where TPU kernels are named",
        FORMS,
        'impl == "tpu" or (impl == "auto" and target_platform() == "tpu")',
        'impl == "tpu"',
        "test_entries.py::test_the_platform_decides_where_nothing_is_named",
    ),
    Mutant(
        "a block leaves while its peers read",
        CLUSTER,
        "for peer in peers]))\n\n    meet_cluster()\n",
        "for peer in peers]))\n",
        JOINS,
    ),
    Mutant(
        "a block joins its own part alone",
        CLUSTER,
        "[read(place, peer, MATRIX) for peer in peers]",
        "[read(place, split, MATRIX) for peer in peers]",
        JOINS,
    ),
    Mutant(
        "the first block learns all counts",
        EXCHANGE,
        '{"part": part})[...] = vector',
        '{"part": 0 * part})[...] = vector',
        COUNTS,
    ),
    Mutant(
        "counts are overwritten before they are read",
        EXCHANGE,
        "        slot = turn % SLOTS\n        self._tell(slot, mine)",
        "        slot = 0 * turn\n        self._tell(slot, mine)",
        COUNTS,
    ),
    Mutant(
        "last unit of entries has no place",
        INDEX_PLAN,
        "max(1, -(-self.capacity // UNIT))",
        "max(1, self.capacity // UNIT)",
        PLACES,
    ),
)

MUTANTS = (*_TREES_AND_CHOICES, *_DRAFTING, *_STATE, *_MODEL, *_KERNELS, *_CLUSTERS_AND_STREAMS)
