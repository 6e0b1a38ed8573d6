"""Files of records, which are valid for the settings with which they were made."""
from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Mapping

from config.files import read_json_file, write_json


def save(path: str, settings: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Write content that was recorded with these settings into a file that `load` reads."""
    record = {"keys": settings, **content}
    write_json(path, {**record, "sha256": _digest(record)}, indent=None)


def load(path: str, settings: Mapping[str, Any], predicate: str, remedy: str) -> Any:
    """Return the content of a file that was recorded with these settings; None if it does not exist.

    Raise ValueError, with the `remedy`, for a file with other settings, or one that `save` did not write; `predicate`
    is the predicate of the latter's message.
    """
    if not path or not Path(path).is_file():
        return None

    record = read_json_file(path, remedy)
    written_digest = record.pop("sha256", "") if isinstance(record, dict) else ""
    if written_digest != _digest(record):
        raise ValueError(f"{path} {predicate}: {remedy}")

    for key_name, value in settings.items():
        recorded_value = record["keys"].get(key_name)
        if recorded_value != value:
            raise ValueError(f"{path} was recorded with {key_name}={recorded_value}, and {key_name}={value} is "
                             f"requested: {remedy}")
    return record


def _digest(record: Any) -> str:
    """Return a checksum, which shows that a file is read as it was written."""
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()
