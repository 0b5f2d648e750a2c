# Sourced by scripts/run and scripts/check: one .venv, brought up to date only when it must be.
# PYTHON=/path/to/python chooses the interpreter that makes .venv.

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

stop() {
    say "$*"
    exit 1
}

# An interpreter that is 3.11 or newer and can make a virtual environment with pip in it.
suits() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then
        suits "$PYTHON" || stop "PYTHON=$PYTHON is not a Python >= 3.11 with the venv module"
        printf '%s\n' "$PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if suits "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    stop "no Python >= 3.11 with the venv module found;" \
        "install one (Debian: python3 and python3-venv) or name one with PYTHON=..."
}

# ensure_venv [EXTRA]: .venv holds this checkout, editable, with the extra's packages. What was
# installed is remembered as a digest of pyproject.toml, written only after pip has succeeded.
ensure_venv() {
    local extra="${1:-}" python want stamp
    if ! suits .venv/bin/python; then
        python="$(find_python)" || exit 1
        [ ! -e .venv ] || say "making .venv anew: its Python does not run or is older than 3.11"
        say "making .venv with $("$python" --version)"
        rm -rf .venv
        "$python" -m venv .venv || stop "could not make .venv"
    fi
    want="$(printf "%s" "$PWD" | cat - pyproject.toml | cksum)"
    stamp=".venv/installed${extra:+-$extra}"
    [ "$(cat "$stamp" 2>/dev/null)" != "$want" ] || return 0
    say "installing jaxspec${extra:+ with its extra '$extra'} into .venv (a minute or a few)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --editable ".${extra:+[$extra]}" || stop "pip could not install what pyproject.toml names"
    printf '%s' "$want" | tee "$stamp" >.venv/installed
}
