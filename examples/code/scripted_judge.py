"""Serves a judge that follows a rule, to try `JudgeReward` without a model.

    python scripted_judge.py --port 8100

It reads the data that a request quotes. A completion gets the fraction of characters in which it equals the last value
quoted before it, the gold answer, as a score from 0 to 10.
"""

import argparse
import json
import re
from difflib import SequenceMatcher
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def quoted(body: dict[str, Any]) -> list[str]:
    """The values that a request quotes, in order."""
    rules, asked = (message["content"] for message in body["messages"])
    tag = re.search(r"<(data-\w+)>", rules)
    assert tag
    return [json.loads(value) for value in re.findall(f"<{tag[1]}>(.*?)</{tag[1]}>", asked)]


def by_likeness(body: dict[str, Any]) -> str:
    """The reply to a rubric that quotes the gold answer, and then the completion."""
    *_, answer, completion = quoted(body)
    likeness = SequenceMatcher(None, answer, completion, autojunk=False).ratio()
    return json.dumps({"reason": f"{completion[:40]!r} for {answer!r}", "score": round(10 * likeness, 2)})


class Handler(BaseHTTPRequestHandler):
    """Answers as a server of OpenAI's kind does."""

    def do_POST(self) -> None:
        """Reads the body of a request."""
        self.answer(dict(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

    def answer(self, body: dict[str, Any]) -> None:
        """Answers a chat."""
        self.chat(body, by_likeness(body))

    def chat(self, body: dict[str, Any], text: str) -> None:
        """Sends a reply, with the tokens that it took."""
        choices = [{"message": {"role": "assistant", "content": text}}]
        self.reply(200, json.dumps({"choices": choices, "usage": {"total_tokens": len(str(body)) // 4}}))

    def reply(self, status: int, text: str, **headers: str) -> None:
        """Sends an answer."""
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(text.encode()))}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8100)
    ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler).serve_forever()


if __name__ == "__main__":
    main()
