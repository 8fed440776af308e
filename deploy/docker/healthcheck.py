"""Exits with 0 while the service in this container turns; run as the image's health check."""

import os
import sys
from http.client import HTTPConnection, HTTPException

connection = HTTPConnection("127.0.0.1", int(os.environ["FENCEPOST_HTTP_PORT"]), timeout=4)
try:
    connection.request("GET", "/healthz")
    sys.exit(connection.getresponse().status != 200)
except (OSError, HTTPException) as error:
    sys.exit(f"healthz: {error}")
