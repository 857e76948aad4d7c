"""Ask an engine behind `vitwire router` about a photograph, with the openai client.

vitwire router --target encoder:50051 --engine-url http://vllm:8000 --port 8080
python ask_router.py http://localhost:8080/v1 MODEL cat.jpg "What is this?"
"""

import base64
import sys
from pathlib import Path

from openai import OpenAI
from openai.types.chat import ChatCompletionContentPartParam, ChatCompletionUserMessageParam


def question(text: str, photograph: Path) -> ChatCompletionUserMessageParam:
    """The router has the photograph encoded, and the engine gets its embedding."""
    uri = "data:image/jpeg;base64," + base64.b64encode(photograph.read_bytes()).decode()
    content: list[ChatCompletionContentPartParam] = [
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "text", "text": text},
    ]
    return {"role": "user", "content": content}


def main(base_url: str, model: str, photograph: str, text: str) -> None:
    """Print the answer as it arrives."""
    with OpenAI(base_url=base_url, api_key="-") as client:
        stream = client.chat.completions.create(
            model=model, messages=[question(text, Path(photograph))], max_tokens=32, stream=True
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
