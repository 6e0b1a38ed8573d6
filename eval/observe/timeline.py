"""What a run did, read from the spans of its ranks: requests, guesses with their fates, segments with their journeys.

It knows nothing about pages. Times are milliseconds since the first request. Rank 0's spans are followed with a small
tree: guesses are born when the draft grows, text settles when rank 0 prunes, sends text or ends a request, and what
does not stand below the tip has died then.
"""
from __future__ import annotations

from collections import deque
from typing import Any, Dict

Span = Dict[str, Any]
Places = Dict[int, int]  # where a request or a segment stands on the page, by its number
# A node, as the page gets it. kind: prompt, own (said by the target, guessed by nobody) or guess. why it died: wrong
# (the text went on otherwise), dropped (not worth sending) or over (the request ended).
NODE = tuple("id token parent score kind request born segment saidAt said settled died why".split())
# A segment's stay on a rank: rows that came, were computed and went on; their difference was pruned there.
STOP = tuple("rank came rows from to computed left passed".split())
OF_REQUEST = ("from", "to", "answer")
OF_SEGMENT = ("send", "forward", "back", "verify")  # events that a segment has; the others have a node or a request
SHOWN = ("wait", "grow", "verify", "send", "prune", "reset", "forward")  # spans of rank 0 that the page draws
SHOWN_ON_STAGES = ("wait", "prune", "grow")  # a small model on a rank of its own grows


class Story:
    """Everything that happened; `lists` makes plain lists of it."""

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans
        begins = {span["name"]: span["t0"] for span in reversed(spans)}
        self.start: float = begins.get("request", begins.get("send", 0.0))
        self.ranks = sorted({span["rank"] for span in spans})
        self.root = self.ranks[0] if self.ranks else 0
        self.nodes: dict[int, Span] = {}
        self.live: set[int] = set()
        self.requests: list[Span] = []
        self.segments: list[Span] = []
        self.events: list[list[Any]] = []  # time, kind, rank, what, how many
        self._away: deque[int] = deque()  # segments that have not been verified
        self._number: dict[int, int] = {}  # of the segment that a row is in, by the ids that it has on its way
        self._dealt = any("ids" in span for span in spans)  # whether segments go to replicas, and not all one way
        self._answer: list[int] | None = None  # the answer of the next request
        follow = {
            "send": self._send, "grow": self._grow, "verify": self._verify,
            "prune": self._prune, "reset": self._reset, "request": self._request}
        for span in spans:
            if span["rank"] == self.root and span["name"] in follow:
                follow[span["name"]](span)
        self._travel()

    def _ms(self, seconds: float) -> float:
        return round((seconds - self.start) * 1e3, 4)

    def _note(self, at: float, kind: str, what: int, many: int) -> None:
        """An event on rank 0."""
        self.events.append([at, kind, self.root, what, many])

    # --- rank 0: the tree ---------------------------------------------------------------------------------------------

    def _node(self, node: int, token: int, parent: int, at: float) -> Span:
        """The node of this id, which is made if it is new. Raises LookupError if its parent is younger than itself."""
        if parent > node:  # then a way up might have no end
            raise LookupError(f"node {node} stands below {parent}, which is younger")
        if node not in self.nodes:
            made: Span = {"id": node, "token": token, "parent": parent, "born": at}
            made.update(kind="guess", request=len(self.requests) - 1)
            self.nodes[node] = {**dict.fromkeys(NODE), **made}
        return self.nodes[node]

    def _send(self, span: Span) -> None:
        at, number = self._ms(span["t0"]), len(self.segments)
        nodes, text = span["nodes"], span["text"]
        if any(node == parent for node, parent in zip(nodes, span["parents"])):
            self.requests.append({"from": at, "to": None, "answer": self._answer, "said": False})
            self._answer = None
        request = self.requests[-1] if self.requests else {}
        rows = zip(nodes, span["tokens"], span["parents"])
        for i, (node, token, parent) in enumerate(rows):
            new = node not in self.nodes
            entry = self._node(node, token, parent, at)
            entry["segment"] = number
            if i < text and not request["said"]:
                entry.update(kind="prompt", born=request["from"], settled=request["from"])
            elif i >= text and new:  # a draft that was not traced
                self.live.add(node)
        if text and request["said"]:
            self._settle(nodes[text - 1], at)
        segment = {"request": len(self.requests) - 1, "nodes": nodes, "text": text, "sent": at}
        self.segments.append({**segment, "stops": [], "back": None, "verified": None})
        self._away.append(number)
        self._number.update(dict.fromkeys([*nodes, *span.get("ids", ())], number))
        self._note(at, "send", number, len(nodes))

    def _grow(self, span: Span) -> None:
        at = self._ms(span["t1"])
        for node in span.get("gone", ()):
            self._die(node, at, "dropped")
        new = span.get("nodes")
        if not new:
            return
        columns = [span[name] for name in ("tokens", "parents", "scores")]
        for node, token, parent, score in zip(new, *columns):
            self._node(node, token, parent, at)["score"] = round(score, 4)
            self.live.add(node)
        self._note(at, "grow", new[0], len(new))

    def _verify(self, span: Span) -> None:
        at = self._ms(span["t1"])
        for node, token in span.get("said", {}).items():
            self.nodes[int(node)].update(said=token, saidAt=at)
            self.requests[-1]["said"] = True
        number = self._judged(span)
        if number is not None:
            begin = self._ms(span["t0"])
            self.segments[number].update(verified=[begin, at], back=begin)
            self._note(at, "verify", number, len(span.get("said", ())))

    def _judged(self, span: Span) -> int | None:
        """The segment that was judged. Round a ring they come back in order, also those whose rows have all died."""
        if self._dealt:
            return self._of(span)
        return self._away.popleft() if self._away else None

    def _of(self, span: Span) -> int | None:
        """The segment that a span is about, if one of its rows is left to show it."""
        return next(map(self._number.get, span["nodes"]), None)

    def _prune(self, span: Span) -> None:
        if span.get("parent") in self.nodes:  # not of a request that sent nothing, nor where rank 0 is a stage as well
            at = self._ms(span["t0"])
            self._node(span["tip"], span["token"], span["parent"], at)
            self._settle(span["tip"], at)

    def _reset(self, span: Span) -> None:
        self._prune(span)
        at = self._ms(span["t0"])
        for node in list(self.live):
            self._die(node, at, "over")
        self._away.clear()
        if self.requests:
            self.requests[-1]["to"] = self._ms(span["t1"])
            self._note(at, "end", len(self.requests) - 1, 0)

    def _request(self, span: Span) -> None:
        """The settled tokens that are the answer, as the one who asked says; this span begins before all others."""
        self._answer = span["answer"]

    def _settle(self, tip: int, at: float) -> None:
        """The text goes on to `tip`: what stands on the way there is settled, and what stands beside it dies."""
        path = []
        node = tip
        while self.nodes[node]["settled"] is None:
            path.append(node)
            parent = self.nodes[node]["parent"]
            if parent == node:  # where a text begins
                break
            node = parent
        for node in path:
            self.nodes[node]["settled"] = at
            if node not in self.live:
                self.nodes[node]["kind"] = "own"
            self.live.discard(node)
        for node in sorted(self.live):  # parents first
            parent = self.nodes[node]["parent"]
            if parent != tip and parent not in self.live:
                self._die(node, at, "wrong")
        if path:
            self._note(at, "settle", tip, len(path))

    def _die(self, node: int, at: float, why: str) -> None:
        if node in self.live:
            self.live.remove(node)
            self.nodes[node].update(died=at, why=why)

    # --- the segments' ways -------------------------------------------------------------------------------------------

    def _travel(self) -> None:
        """What came to a rank leaves it in that order, a Prune aside: so a segment is known though all rows died."""
        for here in self.ranks:
            mine = [span for span in self.spans if span["rank"] == here]
            came = [span for span in mine if span["name"] == "recv" and span["kind"] != "Prune"]
            left = [span for span in mine if span["name"] == "send"]
            computed = [span for span in mine if span["name"] == "forward" and span["nodes"]]
            forwards = {self._of(span): span for span in computed}
            numbers = iter(range(len(self.segments)))
            for i, span in enumerate(came):
                number = None
                if span["kind"] == "Segment":
                    number = self._of(span) if self._dealt else next(numbers, None)
                if number is None:
                    continue
                if here == self.root:
                    self._return(number, span)
                else:
                    sent = left[i] if i < len(left) else None
                    self._stay(number, span, forwards.get(number), sent)
        self.events.sort(key=lambda event: event[0])

    def _return(self, number: int, came: Span) -> None:
        """A segment is back on rank 0."""
        at = self._ms(came["t1"])
        self.segments[number]["back"] = at
        self._note(at, "back", number, len(came["nodes"]))

    def _stay(self, number: int, came: Span, forward: Span | None, left: Span | None) -> None:
        """A segment at one of its stops, see STOP; `forward` is None if all of its rows had died before."""
        here = came["rank"]
        arrival = [here, self._ms(came["t1"]), len(came["nodes"])]
        work: list[Any] = [None, None, 0]
        departure: list[Any] = [None, None]
        if forward:
            work = [self._ms(forward["t0"]), self._ms(forward["t1"]), len(forward["nodes"])]
            self.events.append([work[0], "forward", here, number, work[2]])
        if left:
            departure = [self._ms(left["t0"]), len(left["nodes"])]
        self.segments[number]["stops"].append(arrival + work + departure)

    # --- for the page -------------------------------------------------------------------------------------------------

    def lists(self, first: int = 0, last: int | None = None) -> dict[str, Any]:
        """Requests `first` to `last`, the last not included, as lists that JSON can hold.

        Raises ValueError if the trace has none of them.
        """
        asked = self._asked()
        numbers = asked[first:last]
        if not numbers:
            raise ValueError(f"there are {len(asked)} requests in the trace: choose among 0:{len(asked)}")
        chosen = [self.requests[number] for number in numbers]
        begin, end = chosen[0]["from"], chosen[-1]["to"] or float("inf")
        answers = [{key: request[key] for key in OF_REQUEST} for request in chosen]
        requests = {number: place for place, number in enumerate(numbers)}
        sent = [number for number, segment in enumerate(self.segments) if segment["request"] in requests]
        segments = {number: place for place, number in enumerate(sent)}
        shown = [span for span in self.spans if self._is_shown(span, begin, end)]
        return {
            "ranks": self.ranks,
            "columns": {"node": NODE, "stop": STOP},
            "left_out": len(asked) - len(numbers),
            "requests": answers,
            "segments": [self._segment(number, requests) for number in sent],
            "nodes": self._rows(requests, segments),
            "events": self._between(begin, end, requests, segments),
            "spans": [self._bar(span) for span in shown]}

    def _asked(self) -> list[int]:
        """The numbers of the requests whose answers somebody wanted; of all, if none is marked as such."""
        wanted = [number for number, request in enumerate(self.requests) if request["answer"] is not None]
        return wanted or list(range(len(self.requests)))  # what nobody asked only measured the pipeline

    def _segment(self, number: int, requests: Places) -> Span:
        segment = self.segments[number]
        return {**segment, "request": requests[segment["request"]]}

    def _rows(self, requests: Places, segments: Places) -> list[list[Any]]:
        """The nodes of these requests, see NODE; requests and segments are named by their places on the page."""
        rows = []
        for node in self.nodes.values():
            if node["request"] in requests:
                places = {"request": requests[node["request"]], "segment": segments.get(node["segment"])}
                rows.append([{**node, **places}[name] for name in NODE])
        return rows

    def _between(self, begin: float, end: float, requests: Places, segments: Places) -> list[list[Any]]:
        """The events of this time; requests and segments are named by their places on the page, nodes by their ids."""
        places = {**dict.fromkeys(OF_SEGMENT, segments), "end": requests}
        found = []
        for at, kind, here, what, many in self.events:
            if begin <= at <= end:
                named = places.get(kind, {}).get(what, what)
                found.append([at, kind, here, named, many])
        return found

    def _is_shown(self, span: Span, begin: float, end: float) -> bool:
        """Whether a span lies in this time, and is one that the page draws on its rank."""
        drawn = SHOWN if span["rank"] == self.root else SHOWN_ON_STAGES
        if span["name"] not in drawn:
            return False
        return begin <= self._ms(span["t1"]) and self._ms(span["t0"]) <= end

    def _bar(self, span: Span) -> list[Any]:
        begin, end = self._ms(span["t0"]), self._ms(span["t1"])
        return [span["rank"], span["name"], begin, end, span.get("tip")]
