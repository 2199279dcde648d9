"""MLflow's server in one process, opening the comparison of learners; its AI assistant is off.

``python -m itercast.eval.tracking.server`` runs it; ``itercast ui`` starts that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from itercast.eval.tracking.store import tracking_uri, without_telemetry

HOST = "127.0.0.1"
START = Path(__file__).with_name("start.js")
ASSISTANT = "/mlflow/assistant"  # part of the addresses of the assistant's requests
HEAD = (
    '<script src="itercast-start.js"></script>'
    "<style>[data-assistant-ui]{display:none !important}</style>"
)


class Pages:
    """ASGI wrapper of MLflow's ``app`` that adds ``start.js`` to its page, without AI assistant."""

    def __init__(self, app: Any, index: Path) -> None:
        self.app = app
        page = index.read_text().replace("<script", f"{HEAD}<script", 1)
        self.files = {
            "/": (page.encode(), "text/html"),
            "/itercast-start.js": (START.read_bytes(), "text/javascript"),
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request (ASGI)."""
        from starlette.responses import Response

        path = scope.get("path", "")
        if scope["type"] == "http" and path in self.files:
            body, kind = self.files[path]
            await Response(body, media_type=kind)(scope, receive, send)
        elif scope["type"] == "http" and ASSISTANT in path:
            await Response(status_code=404)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def settings(uri: str) -> dict[str, str]:
    """Environment of MLflow's server for the store ``uri``: serves artifacts, runs no jobs."""
    return {
        "_MLFLOW_SERVER_FILE_STORE": uri,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": Path("mlartifacts").resolve().as_uri(),
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def serve(port: int) -> None:
    """Serve the project's store until interrupted; prints the address when it answers."""
    without_telemetry()
    os.environ.update(settings(tracking_uri()))
    import mlflow.server
    import uvicorn
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores(tracking_uri())
    pages = Pages(app, Path(mlflow.server.__file__).parent / "js/build/index.html")

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                sys.stdout.write(f"MLflow UI: http://{HOST}:{port}  (Ctrl-C ends it)\n")
                sys.stdout.flush()

    Server(uvicorn.Config(pages, host=HOST, port=port, log_level="warning")).run()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
