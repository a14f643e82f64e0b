"""A translator that starts when it is let: `python slow_translator.py FOLDER`, without LiteLLM.

Each start leaves a line with its pid in FOLDER/started and waits for FOLDER/go. Answers 200 to everything.
"""

from __future__ import annotations

import json
import os
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any


class Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def serve(folder: Path) -> None:
    start_up = json.loads(sys.stdin.buffer.readline())
    with (folder / "started").open("a") as started:
        started.write(f"{os.getpid()}\n")
    while not (folder / "go").exists():
        time.sleep(0.005)
    server = socketserver.ThreadingUnixStreamServer(start_up["socket_path"], Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
