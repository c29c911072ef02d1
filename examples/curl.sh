#!/bin/sh
# An answer as server-sent events, by curl. Argument: the server's address.
set -eu
exec curl --silent --show-error --fail-with-body --no-buffer \
    "${1:-http://127.0.0.1:8000}/v1/chat/completions" \
    -H 'Content-Type: application/json' \
    -H "Authorization: Bearer ${OPENAI_API_KEY:-none}" \
    -d '{
      "messages": [
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": "What is the capital of France?"}
      ],
      "max_tokens": 48, "temperature": 0,
      "stream": true, "stream_options": {"include_usage": true}
    }'
