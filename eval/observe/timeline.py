"""The history of a run, from the spans of its ranks: requests, guesses with their fates, and segments on their way.

Times are milliseconds since the first request. A small tree follows the spans of rank 0: guesses are born when the
draft grows; text settles when rank 0 prunes, sends text or ends a request; then guesses that are not below the tip
die.
"""
from __future__ import annotations

from collections import deque
from itertools import chain, repeat
from typing import Any, Dict

HistoryEntry = Dict[str, Any]
# Fields of a node besides id, token, parent, kind, request and birth. `kind`: prompt, own (from the target, without a
# guess) or guess. `why` it died: wrong (the text continued differently), dropped (not worth sending) or over (the
# request ended).
NODE_FIELDS = dict.fromkeys(("score", "segment", "saidAt", "said", "settled", "died", "why"))
# Fields of a segment's stay on a rank besides the rows that came; rows that did not pass on were pruned there. All of
# them may have died before they were computed.
STAY_FIELDS: HistoryEntry = {"from": None, "to": None, "computed": 0, "left": None, "passed": None}
SEGMENT_EVENTS = ("send", "forward", "back", "judge")  # events of a segment; the others are of a node or a request
SHOWN_ON_ROOT = ("wait", "grow", "judge", "send", "prune", "reset", "forward")  # spans of rank 0 that the page draws
SHOWN_ON_STAGES = ("wait", "prune")


class RunHistory:
    """The history of a run; `data` returns it as JSON objects."""

    def __init__(self, spans: list[HistoryEntry]) -> None:
        first_begins = {span["name"]: span["t0"] for span in reversed(spans)}
        run_start: float = first_begins.get("request", first_begins.get("send", 0.0))

        def moment(seconds: float) -> float:
            return round((seconds - run_start) * 1e3, 4)

        self.spans = [{**span, "t0": moment(span["t0"]), "t1": moment(span["t1"])}
                      for span in spans]
        self.ranks = sorted({span["rank"] for span in spans})
        self.root = self.ranks[0] if self.ranks else 0

        self.nodes: dict[int, HistoryEntry] = {}
        self.live: set[int] = set()
        self.requests: list[HistoryEntry] = []
        self.segments: list[HistoryEntry] = []
        self.events: list[HistoryEntry] = []

        self._unjudged: deque[int] = deque()  # segments that are not judged yet
        self._segment_by_id: dict[int, int] = {}  # by the ids that its rows have on their way
        self._has_replicas = any("ids" in span for span in spans)  # whether segments go to several replicas
        self._num_unsent = 0  # requests that have begun, and sent nothing yet

        handlers = {
            "send": self._send, "grow": self._grow, "judge": self._judge,
            "prune": self._prune, "reset": self._reset, "request": self._request}
        for span in self.spans:
            if span["rank"] == self.root and span["name"] in handlers:
                handlers[span["name"]](span)

        self._add_stays()

    def _note(self, at: float, kind: str, subject: int, count: int, **stage: int) -> None:
        """Add an event of rank 0, or of the stage that is given."""
        event = {"at": at, "kind": kind, "what": subject, "many": count}
        self.events.append({**event, "rank": self.root, **stage})

    # --- rank 0: the tree ---------------------------------------------------------------------------------------------

    def _node(self, node: int, token: int, parent: int, at: float) -> HistoryEntry:
        """Return the node of this id, creating it if it is new. Raise LookupError if its parent is younger."""
        if parent > node:  # else a path to the root might not end
            raise LookupError(f"node {node} stands below {parent}, which is younger")
        if node not in self.nodes:
            self.nodes[node] = {"id": node, "token": token, "parent": parent, "kind": "guess",
                                "request": len(self.requests) - 1, "born": at, **NODE_FIELDS}
        return self.nodes[node]

    def _send(self, span: HistoryEntry) -> None:
        sent_at, segment_number = span["t0"], len(self.segments)
        nodes, num_text = span["nodes"], span["text"]

        if any(node == parent for node, parent in zip(nodes, span["parents"])):
            if not self._num_unsent:  # it only measures the pipeline
                self._begin(sent_at, None)
            self._num_unsent -= 1
        request = self.requests[-1] if self.requests else {}

        for row_index, row in enumerate(zip(nodes, span["tokens"], span["parents"])):
            if row_index >= num_text and row[0] not in self.nodes:  # a draft that was not traced
                self.live.add(row[0])
            node_entry = self._node(*row, sent_at)
            node_entry["segment"] = segment_number
            if row_index < num_text and not request["said"]:
                node_entry.update(kind="prompt", born=request["from"], settled=request["from"])
        if num_text and request["said"]:
            self._settle(nodes[num_text - 1], sent_at)

        self.segments.append({"request": len(self.requests) - 1,
                              "nodes": nodes, "text": num_text, "sent": sent_at,
                              "stops": [], "back": None, "judged": None})
        self._unjudged.append(segment_number)
        row_ids = [*nodes, *span.get("ids", ())]
        self._segment_by_id.update(dict.fromkeys(row_ids, segment_number))
        self._note(sent_at, "send", segment_number, len(nodes))

    def _grow(self, span: HistoryEntry) -> None:
        grown_at = span["t1"]
        for node in span.get("gone", ()):
            self._die(node, grown_at, "dropped")

        new_nodes = span.get("nodes")
        if new_nodes:
            guesses = zip(new_nodes, span["tokens"], span["parents"], span["scores"])
            for node, token, parent, score in guesses:
                self._node(node, token, parent, grown_at)["score"] = round(score, 4)
            self.live.update(new_nodes)
            self._note(grown_at, "grow", new_nodes[0], len(new_nodes))

    def _judge(self, span: HistoryEntry) -> None:
        judge_begin, judged_at = span["t0"], span["t1"]
        for node, token in span.get("answers", {}).items():
            self.nodes[int(node)].update(said=token, saidAt=judged_at)
            self.requests[-1]["said"] = True

        segment_number: int | None = None
        if self._has_replicas:
            segment_number = self._segment_of(span)
        elif self._unjudged:  # round a ring, segments come back in order, even those of which all rows have died
            segment_number = self._unjudged.popleft()

        if segment_number is not None:
            self.segments[segment_number].update(judged=[judge_begin, judged_at], back=judge_begin)
            self._note(judged_at, "judge", segment_number, len(span.get("answers", ())))

    def _segment_of(self, span: HistoryEntry) -> int | None:
        """Return the segment of a span, if any of its rows is left to identify it."""
        return next(map(self._segment_by_id.get, span["nodes"]), None)

    def _prune(self, span: HistoryEntry) -> None:
        if span.get("parent") in self.nodes:  # unless the request sent nothing, or rank 0 is a stage as well
            self._node(span["tip"], span["token"], span["parent"], span["t0"])
            self._settle(span["tip"], span["t0"])

    def _reset(self, span: HistoryEntry) -> None:
        self._prune(span)
        for node in list(self.live):
            self._die(node, span["t0"], "over")
        self._unjudged.clear()
        if self.requests:
            self.requests[-1]["to"] = span["t1"]
            self._note(span["t0"], "end", len(self.requests) - 1, 0)

    def _request(self, span: HistoryEntry) -> None:
        """Begin a request with its answer: this span begins before all others, also before a growth without a send."""
        self._begin(span["t0"], span["answer"])

    def _begin(self, begun_at: float, answer: list[int] | None) -> None:
        self._num_unsent += 1
        self.requests.append({"from": begun_at, "to": None, "answer": answer, "said": False})

    def _settle(self, tip: int, settled_at: float) -> None:
        """Continue the text to `tip`: the nodes on the way there settle, and guesses beside it die."""
        num_settled, node_entry = 0, self.nodes[tip]

        while node_entry["settled"] is None:
            num_settled += 1
            node_entry["settled"] = settled_at
            if node_entry["id"] not in self.live:
                node_entry["kind"] = "own"
            self.live.discard(node_entry["id"])
            node_entry = self.nodes[node_entry["parent"]]  # the first node of a text is its own

        for node in sorted(self.live):  # parents first
            parent_id = self.nodes[node]["parent"]
            if parent_id != tip and parent_id not in self.live:
                self._die(node, settled_at, "wrong")

        if num_settled:
            self._note(settled_at, "settle", tip, num_settled)

    def _die(self, node: int, died_at: float, why: str) -> None:
        if node in self.live:
            self.live.remove(node)
            self.nodes[node].update(died=died_at, why=why)

    # --- the segments on their way ------------------------------------------------------------------------------------

    def _add_stays(self) -> None:
        """Add the segments' stays, also without rows: messages leave a rank in the order in which they came."""
        for peer in self.ranks:
            peer_spans = [span for span in self.spans if span["rank"] == peer]
            received = [span for span in peer_spans if span["name"] == "recv" and span["kind"] != "Prune"]
            sent = (span for span in peer_spans if span["name"] == "send")
            forward_spans = {self._segment_of(span): span for span in peer_spans
                             if span["name"] == "forward" and span["nodes"]}
            segment_numbers = iter(range(len(self.segments)))

            for received_span, sent_span in zip(received, chain(sent, repeat(None))):
                if received_span["kind"] != "Segment":
                    continue
                in_order = not self._has_replicas
                segment_number = next(segment_numbers, None) if in_order else self._segment_of(received_span)
                if segment_number is None:
                    continue

                if peer == self.root:
                    returned_at = received_span["t1"]
                    self.segments[segment_number]["back"] = returned_at
                    self._note(returned_at, "back", segment_number, len(received_span["nodes"]))
                else:
                    self._stay(segment_number, received_span, forward_spans.get(segment_number), sent_span)

        self.events.sort(key=lambda event: float(event["at"]))

    def _stay(self, segment_number: int, received_span: HistoryEntry,
              forward_span: HistoryEntry | None, sent_span: HistoryEntry | None) -> None:
        """Add the stay of a segment on a stage; `forward_span` is None if all of its rows had died before."""
        peer = received_span["rank"]
        stay = {**STAY_FIELDS, "rank": peer, "came": received_span["t1"], "rows": len(received_span["nodes"])}
        if forward_span:
            stay.update(_bounds(forward_span), computed=len(forward_span["nodes"]))
            self._note(stay["from"], "forward", segment_number, stay["computed"], rank=peer)
        if sent_span:
            stay.update(left=sent_span["t0"], passed=len(sent_span["nodes"]))
        self.segments[segment_number]["stops"].append(stay)

    # --- for the page -------------------------------------------------------------------------------------------------

    def data(self, first: int = 0, last: int | None = None) -> HistoryEntry:
        """Return requests `first` to `last`, without the last; they and their segments are numbered from 0.

        Raise ValueError if the trace has none of them.
        """
        answered = [number for number, request in enumerate(self.requests) if request["answer"] is not None]
        # a request without an answer only measured the pipeline
        selectable = answered or list(range(len(self.requests)))
        numbers = selectable[first:last]
        if not numbers:
            raise ValueError(f"there are {len(selectable)} requests in the trace: choose among 0:{len(selectable)}")

        # new numbers of requests and segments
        requests = [self.requests[number] for number in numbers]
        begin, end = requests[0]["from"], requests[-1]["to"] or float("inf")
        new_requests = {number: index for index, number in enumerate(numbers)}
        sent = [number for number, segment in enumerate(self.segments) if segment["request"] in new_requests]
        new_segments = {number: index for index, number in enumerate(sent)}

        def renumbered(entry: HistoryEntry) -> HistoryEntry:
            """Return a segment or a node with the new numbers of its request and segment."""
            copy = {**entry, "request": new_requests[entry["request"]]}
            if "segment" in entry:
                copy["segment"] = new_segments.get(entry["segment"])
            return copy

        # events
        new_numbers = {**dict.fromkeys(SEGMENT_EVENTS, new_segments), "end": new_requests}
        events = [{**event, "what": new_numbers.get(event["kind"], {}).get(event["what"], event["what"])}
                  for event in self.events if begin <= event["at"] <= end]

        # spans
        meanwhile = [span for span in self.spans if begin <= span["t1"] and span["t0"] <= end]
        bars = [{"rank": span["rank"], "name": span["name"], "tip": span.get("tip"), **_bounds(span)}
                for span in meanwhile
                if span["name"] in (SHOWN_ON_ROOT if span["rank"] == self.root else SHOWN_ON_STAGES)]

        return {
            "ranks": self.ranks,
            "left_out": len(selectable) - len(numbers),
            "requests": [{key: request[key] for key in ("from", "to", "answer")} for request in requests],
            "segments": [renumbered(self.segments[number]) for number in sent],
            "nodes": [renumbered(node) for node in self.nodes.values() if node["request"] in new_requests],
            "events": events,
            "spans": bars}


def _bounds(span: HistoryEntry) -> HistoryEntry:
    return {"from": span["t0"], "to": span["t1"]}
