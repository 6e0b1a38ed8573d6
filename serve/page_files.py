"""The files of the chat page, and the policy under which a browser reads them: nothing comes from another host."""
from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
PATTERNS = ("page/*.css", "page/*.js", "vendor/*/*.js")
PAGE_SOURCES = [path for pattern in PATTERNS for path in sorted(FOLDER.glob(pattern))]
FILES = {"/": FOLDER / "page" / "chat.html", **{f"/page/{path.name}": path for path in PAGE_SOURCES}}
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# Scripts and styles are files of this server. Only the sanitizer may turn a string into markup.
POLICY = "; ".join((
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'", "base-uri 'none'",
    "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'", "trusted-types dompurify"))
HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache"}
