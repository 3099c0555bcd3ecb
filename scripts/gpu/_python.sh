# Sourced by gpu_check and tune_kernels. Leaves in $PYTHON an interpreter that has what they import, installs nothing
# and touches no network: they run on machines that have a GPU, jax and nothing else. $JAXSCHED_PYTHON overrides.

set -euo pipefail
ROOT=$(CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

PYTHON=""
found="" # what was tried, for the message
if [ -n "${JAXSCHED_PYTHON:-}" ]; then
    candidates=("$JAXSCHED_PYTHON")
else
    candidates=("$ROOT/.venv/bin/python" python3 python python3.12 python3.13)
fi
for candidate in "${candidates[@]}"; do
    command -v "$candidate" >/dev/null 2>&1 || continue
    answer=$("$candidate" "$ROOT/scripts/gpu/probe.py" 2>/dev/null </dev/null) || answer=${answer:-"does not run"}
    case $answer in
    cuda) # jax with a CUDA plugin: the best there is
        PYTHON=$candidate
        break
        ;;
    cpu) PYTHON=${PYTHON:-$candidate} ;;
    *) found="$found
  $candidate: $answer" ;;
    esac
done
if [ -z "$PYTHON" ]; then
    echo "No Python here has what this script imports.${found:-" None was found."}" >&2
    echo "Make one where there is a package index:  scripts/test tests/test_toys.py   (makes .venv, with CUDA if there is a GPU)" >&2
    echo "or name one:  JAXSCHED_PYTHON=/path/to/python" >&2
    exit 1
fi
