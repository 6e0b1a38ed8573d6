"""Whether rank 0 has the leisure to draft: what a level of guesses promises, against what would wait for it meanwhile.

It knows nothing about how guesses are made. An answer that comes while rank 0 drafts waits until the level is done, and
all that follows waits with it.
"""
from __future__ import annotations

import math

LAST = 3.0  # seconds; what lies as far back counts 1 / e
FADING = 1.02  # by which the shortest time of a level grows with each new one, so that a slower draft is believed
DOUBT = 0.97  # by which it shrinks whenever it speaks against a level, so that one is tried again now and then
MARGIN = 2.0  # tokens that a level must promise for each token that would be settled while others wait for it


class Leisure:
    """How fast the text of all requests grows, and how long a level takes, of late."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # settled, and passed; what is old counts less
        self._since: float | None = None
        self._level: float | None = None

    def settled(self, tokens: int, now: float) -> None:
        """So many tokens have become text."""
        passed = 0.0 if self._since is None else now - self._since
        fading = math.exp(-passed / LAST)
        counts = LAST * (1 - fading) / passed if passed else 1.0  # of what happened since, and in the mean
        self._tokens = self._tokens * fading + tokens * counts
        self._seconds = self._seconds * fading + passed * counts
        self._since = now

    def drafted(self, seconds: float) -> None:
        """The networks have computed for so long on one level."""
        known = seconds if self._level is None else FADING * self._level
        self._level = min(seconds, known)  # what takes longer has read a prompt, too, or was held up

    def pays(self, promise: float, due: float, now: float) -> bool:
        """Whether to begin a level that promises so many tokens, if the next answer is due at this moment."""
        if not self._level or not self._seconds:
            return True
        waits = now + self._level - max(due, now)
        rate = self._tokens / self._seconds
        if promise >= MARGIN * rate * waits:
            return True
        self._level *= DOUBT
        return False


class Drafting:
    """What one request tells of its levels and its text, which has so many tokens at first."""

    def __init__(self, leisure: Leisure, text: int) -> None:
        self._leisure, self._text = leisure, text
        self._level = 0.0  # seconds that were computed for the newest level

    def computed(self, seconds: float) -> None:
        """Networks have computed for so long for this request."""
        self._level += seconds

    def settled(self, text: int, now: float) -> None:
        """The text has so many tokens."""
        self._leisure.settled(text - self._text, now)
        self._text = text

    def pays(self, promise: float, due: float, now: float) -> bool:
        """Whether the next level pays, as `Leisure.pays` says; the one before is done."""
        if self._level:
            self._leisure.drafted(self._level)
        self._level = 0.0
        return self._leisure.pays(promise, due, now)
