"""Whether a server answers the calls that workers make, under the name that they use: healthy.py URL HOST [JSON].

MLflow's /health answers 200 also where every real call is refused for its Host header or for want of a login.
"""

from __future__ import annotations

import base64
import os
import sys
import urllib.error
import urllib.request


def main(url: str, host: str, body: str | None = None) -> int:
    """0 for an answer 200."""
    headers = {"Host": host, "Content-Type": "application/json"}
    if user := os.environ.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    request = urllib.request.Request(url, body.encode() if body else None, headers)
    try:
        with urllib.request.urlopen(request, timeout=8) as answer:
            return 0 if answer.status == 200 else 1
    except (urllib.error.URLError, OSError) as error:
        sys.stderr.write(f"{url} as {host}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
