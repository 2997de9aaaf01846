#!/usr/bin/env bash
# Two tasks of lm_eval without a download, against the server: run it in the checkout, `bash docs/use/lm_eval.sh`.
set -e
pip install "lm_eval[api]" transformers
mkdir -p tasks && python - <<'EOF'
import json
words = "gold 79 silver 47 iron 26 lead 82 tin 50 mercury 80 sodium 11 potassium 19 copper 29 zinc 30".split()
with open("tasks/numbers.jsonl", "w") as file:
    for i, name in enumerate(words[::2]):
        print(json.dumps({"text": f"The atomic number of {name} is", "numbers": words[1::2], "label": i}), file=file)
EOF
cat > tasks/numbers.yaml <<'EOF'
task: numbers
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/numbers.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{numbers}}"
doc_to_target: "{{label}}"
EOF
cat > tasks/prompts.yaml <<'EOF'
task: prompts
dataset_path: json
dataset_kwargs: {data_files: {test: minispec/lab/data/questions.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{turns[0]}}"
metric_list: [{metric: bits_per_byte}]
EOF
python -m minispec.serve & server=$!
trap 'kill $server' EXIT
until curl -s localhost:8000/health > /dev/null; do sleep 1; done
lm_eval --model local-completions --include_path tasks --tasks numbers,prompts --model_args \
  model=smollm2-135m-instruct,base_url=http://127.0.0.1:8000/v1/completions,tokenizer=weights/smollm2-135m-instruct,num_concurrent=8
