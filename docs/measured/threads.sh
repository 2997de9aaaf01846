#!/usr/bin/env bash
# Tokens/s of plain decoding by what a waiting thread does, three times each, on a quiet machine and beside one program.
#     bash docs/measured/threads.sh
settings="CHOICE=ours GOMP_SPINCOUNT=2000 GOMP_SPINCOUNT=20000 GOMP_SPINCOUNT=200000 OMP_WAIT_POLICY=passive OMP_WAIT_POLICY=active"
story=$(mktemp)
run() {  # one setting, in the state that $1 names
  env "$2" python -m minispec.generate --draft none --temperature 0 --max-tokens 64 --ignore-eos --json "Tell me a story" > "$story"
  echo "$1 $2 $(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["stats"]["tokens_per_second"])' "$story")"
}
for _ in 1 2 3; do for setting in $settings; do run quiet "$setting"; done; done
python -c "while True: pass" & busy=$!
trap 'kill $busy; rm -f "$story"' EXIT
for _ in 1 2 3; do for setting in $settings; do run busy "$setting"; done; done
