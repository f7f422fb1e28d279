"""What the services beside `flow serve` have in common: OpenAI's path for transcripts, one recording at a time, on a free port
of loopback, which is told as `flow serve` tells it."""

import socket
import tempfile
import threading

import uvicorn
from fastapi import FastAPI, UploadFile


def serve(transcribe):
    """`transcribe` has the path of a WAV file and gives a text."""
    app, one_at_a_time = FastAPI(), threading.Lock()

    @app.get("/ready")
    def ready():
        return {"status": "ready"}

    @app.post("/v1/audio/transcriptions")
    def transcriptions(file: UploadFile):
        with tempfile.NamedTemporaryFile(suffix=".wav") as recording:
            recording.write(file.file.read())
            recording.flush()
            with one_at_a_time:
                return {"text": transcribe(recording.name)}

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    print("listening on http://127.0.0.1:%d" % listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])
