"""Training of small DeepSeek-V4 models: language model, MTP block and indexer together."""
