#!/usr/bin/env python3
"""An endpoint for gate1_key on 127.0.0.1: a list of models, and a message. It accepts one key.

service.py FOLDER KEY: writes FOLDER/settings.json for itself and serves until its standard input ends.
"""

import http.server
import json
import pathlib
import sys
import threading

folder, key = pathlib.Path(sys.argv[1]), sys.argv[2]
MODEL = "tiny-judge"


class Endpoint(http.server.BaseHTTPRequestHandler):
    def reply(self, answer):
        status = 200
        if self.headers.get("x-api-key") != key:
            status, answer = 401, {"type": "error", "error": {"type": "authentication_error", "message": "no such key"}}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply({"data": [{"type": "model", "id": MODEL}], "has_more": False})

    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        text = [{"type": "text", "text": "ready"}]
        usage = {"input_tokens": 12, "output_tokens": 1}
        message = {"id": "m", "type": "message", "role": "assistant", "model": MODEL, "content": text}
        self.reply({**message, "stop_reason": "end_turn", "usage": usage})

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
threading.Thread(target=server.serve_forever, daemon=True).start()
settings = {
    "api_base": f"http://127.0.0.1:{server.server_port}",
    "api_key_env": "LADDER_KEY",
    "default_model": MODEL,
    "timeout_sec": 10,
    "max_retries": 1,
}
(folder / "settings.new").write_text(json.dumps(settings))
(folder / "settings.new").rename(folder / "settings.json")
sys.stdin.read()
