# What the pipelines' scripts share; they source it. It finds the rlft command and its Python before any stage runs.
#   RLFT     the rlft command; by default the one on PATH, else the repository's .venv/bin/rlft
#   PYTHON   the Python that prints the table; by default the one beside that command
#   SEED     every stage's seed, 0 by default
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
seed=${SEED:-0}

# bash obeys a trap when the stage in front has ended: a stage that is told to stop saves first, and no other begins.
trap 'exit 130' INT TERM

fail() { echo "$(basename "$0"): $1" >&2; exit 2; }

if [ -n "${RLFT:-}" ]; then
  read -ra rlft <<<"$RLFT"  # may be several words
elif command -v rlft >/dev/null; then
  rlft=(rlft)
elif [ -x "$here/../.venv/bin/rlft" ]; then
  rlft=("$here/../.venv/bin/rlft")
else
  fail "rlft is neither on PATH nor in .venv/bin; run \`make demo\` once, or set RLFT=<path of the command>"
fi
command -v "${rlft[0]}" >/dev/null || fail "RLFT: there is no such command, got ${rlft[0]}; set it to the path of rlft"
beside=$(dirname "$(command -v "${rlft[0]}")")/python
[ -x "$beside" ] || beside=python3
python=${PYTHON:-$beside}
"$python" -c 'import rich, rlft, yaml' 2>/dev/null ||
  fail "PYTHON: $python cannot import rlft; set PYTHON=<Python of the environment that rlft is installed in>"

# needs <module> <extra> <why>: stops before the first stage if an optional requirement is missing.
needs() {
  "$python" -c "import $1" 2>/dev/null ||
    fail "$3 needs $1, which is not installed; run \`$python $here/install.py --extras $2\`, then this again"
}

# learn <command> <folder> <words>: a stage that trains. sample <folder> <words>: one that samples.
learn() {
  local command=$1 folder=$2; shift 2
  "${rlft[@]}" "$command" "$@" seed="$seed" console=null resume=auto hydra.run.dir="$out/$folder"
}
sample() {
  local folder=$1; shift
  "${rlft[@]}" sample "$@" seed="$seed" resume=auto hydra.run.dir="$out/$folder"
}
# exported <folder> <run's folder>: the model of a run, made again where that run is another one by now.
exported() { "$python" "$here/fresh_export.py" "$out/$2" "$out/$1" "${rlft[@]}"; }
# table <name=folder> ..: what each stage reached; the same as numbers in stages.json.
table() { "$python" "$here/stage_table.py" --in "$out" --json "$out/stages.json" "$@"; }
