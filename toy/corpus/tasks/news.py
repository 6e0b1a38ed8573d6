"""Short news articles, and summaries of them (the kind called sum); names, places and numbers are in the article."""

from __future__ import annotations

from dataclasses import dataclass

from toy.corpus.tasks.facts import NAMES, family_name, place_name
from toy.corpus.tasks.grammar import DialogueTurns, PhraseWriter, TemplateSlots, after, capital

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ROLES = ("mayor", "police chief", "head teacher", "harbour master", "local councillor", "museum director",
         "union leader", "fire officer", "hospital doctor", "shop owner", "railway manager", "city engineer", "farmer",
         "club president")


@dataclass(frozen=True)
class NewsEvent:
    """One kind of news: what its article says, and what a summary says about it."""

    thing: str
    lead: str
    sentences: tuple[str, ...]  # after the lead
    short_lead: str
    short_clauses: tuple[str, ...]  # one for each of `sentences`, in the same order


EVENTS = (
    NewsEvent(
        "{paper mill|warehouse|timber yard|theatre|bakery|school gym|furniture shop|old hotel}",
        "A {fire|large fire|blaze} {destroyed|damaged|broke out in|swept through} "
        "a(n) <x> in <town> on <day>{ {night|morning}|}.",
        (
            "{About|Nearly|Some|Around} <n> {firefighters|volunteers} {fought|battled} the flames for <m> hours.",
            "{Smoke|A cloud of smoke} could be seen {as far away as|in} <other>.",
            "{Nobody was hurt|<k> people were treated for smoke|One worker was {slightly |}injured}.",
            "The {cause|reason} {is not yet known|was {a broken heater|an electrical fault|a forgotten candle}, "
            "experts say}.",
            "The damage is {put|estimated} at <m> million crowns."),
        "{a {fire|blaze} {hit|damaged|struck} a(n) <x> in <town>|a(n) <x> in <town> {burned|caught fire|"
        "went up in flames}}{ on <day>|}",
        (
            "<n> {helpers|firefighters|volunteers} {fought it|needed <m> hours|worked for <m> hours}",
            "the smoke {reached|was seen from} <other>",
            "{the article|a report} {speaks of|mentions} {the injured|the state of the people}",
            "the {cause|reason} is {discussed|mentioned|under study}",
            "the {loss|damage} is {about|some|around} <m> million{ crowns|}")),
    NewsEvent(
        "{bridge|railway station|swimming pool|library|tram line|hospital wing|market hall|sports hall|cycle path}",
        "The {new|long awaited|rebuilt} <x> of <town> was {opened|handed over to the public|inaugurated} on <day>.",
        (
            "The {work|building} took <m> years and cost <n> million crowns{, more than planned|}.",
            "{More than|About|At least} <n>0 {people|visitors|residents} {came to the opening|stood in line|"
            "joined the party}.",
            "It {replaces|stands beside} the old one, which was {closed|torn down} <k> years ago.",
            "People from <other> will {also |}{use it|profit from it}.",
            "{Critics|Neighbours} {complain about|fear} {noise|traffic|high prices|parking problems}."),
        "{<town> has {opened|celebrated} {its|a} {new |}<x>|the {new |}<x> {in|of} <town> {is|has been} "
        "{open|opened}}{ since <day>|}",
        (
            "it {took|needed} <m> years and <n> million{ crowns|}",
            "<n>0 {people|guests|visitors} {came|were there|took part}",
            "the old one {closed|went} <k> years ago",
            "{also |}people from <other> {gain|profit|benefit}",
            "some {residents|people|neighbours} {worry|complain|are critical}")),
    NewsEvent(
        "{football|hockey|handball|chess|rowing|volleyball|tennis|cricket}",
        "{The <x> team of <town>|<town>'s <x> team} {beat|defeated|overcame} <other> by <m> to <k> on <day>.",
        (
            "{About|Almost|More than} <n>00 {fans|spectators} {watched|followed} the {match|game}.",
            "{The decisive|The last} point {came|fell} <k> minutes before the end.",
            "{The star of the day was|The best player was} <third>, who is only <n> years old.",
            "It was the {team's|side's} <m>th {win|victory} in a row.",
            "<other> {had led at half-time|{lost|missed} its captain {early|after an injury}|will ask for a review}."),
        "{<town> {won|took} {a|the} <x> {match|game} against <other>|the <x> side {of|from} <town> {beat|defeated} "
        "<other>}{ <m> to <k>|}",
        (
            "<n>00 {fans|people|spectators} {were there|saw it}",
            "the {last|final} point {came|fell} {late|<k> minutes before the end}",
            "<third>{, {aged |}<n>,|} {stood out|played best|shone}",
            "it was {win|victory} number <m>{ in a row|}",
            "<other> had {a|its} {hard|mixed|difficult} day")),
    NewsEvent(
        "{storm|flood|heavy snowfall|hailstorm|heat wave|landslide|thunderstorm}",
        "A {severe|sudden|violent} <x> {hit|struck|surprised} {the town of |}<town> {on|late on|early on} <day>.",
        (
            "{Roughly|More than|About} <n>0 {homes|households} {were without power|lost electricity} for <m> hours.",
            "{The road|The railway line} to <other> {is|remains|was} {blocked|closed}{ until further notice|}.",
            "{Volunteers|Soldiers|Neighbours} {handed out|brought} {food|blankets|sandbags|water}.",
            "<k> {people|families} {had to leave their homes|spent the night in a school}.",
            "{Forecasters|Experts} expect {better weather|more rain|calm days} {by|from} the weekend."),
        "{a <x> {hit|struck} <town>|<town> {was hit by|suffered} a <x>}{ on <day>|}",
        (
            "<n>0 {homes|households} {lost|had no} power{ for <m> hours|}",
            "the {way|route|connection} to <other> is {cut|affected}",
            "{helpers|people} {shared|gave out} {goods|what was needed}",
            "<k> {families|people|groups} {were moved|had to leave}",
            "{a change|other weather} is {expected|forecast} {soon|for the weekend}")),
    NewsEvent(
        "{silver cup|painting|violin|rare stamp|bronze statue|gold coin|old map|diamond ring}",
        "A(n) {valuable|famous} <x> was {stolen from|taken from|found missing at} {a museum|a private house|a church|"
        "the town hall} in <town> on <day>.",
        (
            "It is {worth|valued at} {about|nearly|more than} <n>000 crowns.",
            "{The thieves|Two men|A masked person} {came through|broke} a {window|back door|cellar}.",
            "{A witness|A neighbour|A guard} saw a {red|white|dark|green} {van|car|motorcycle} {drive|heading} "
            "towards <other>.",
            "The alarm had been {switched off|out of order} for <m> days.",
            "A reward of <k>00 crowns is {offered|promised}."),
        "{a(n) <x> {was stolen|disappeared|vanished} in <town>|thieves {took|stole} a(n) <x> in <town>}{ on <day>|}",
        (
            "it is worth {about |nearly |}<n>000 crowns",
            "{someone|the thieves|they} {broke in|forced a way in}",
            "a {vehicle|driver} was seen {heading for|on the way to} <other>",
            "the alarm {failed|had not worked} for <m> days",
            "{there is|the owner offers} a reward of <k>00{ crowns|}")),
    NewsEvent(
        "{bus drivers|teachers|nurses|dock workers|bakers|miners|cleaners|rail workers}",
        "{Hundreds of|Some <n>0|About <n>0} <x> in <town> {went on strike|stopped work|walked out} on <day>.",
        (
            "They {ask for|demand} <k> percent more pay{ and shorter hours|}.",
            "{Talks|Negotiations} {broke down|ended} after <m> hours.",
            "The {strike|protest} {may last|is planned for} <m> days.",
            "{Workers|Colleagues} from <other> {have promised to join|support them}.",
            "{Residents|Many people} {show understanding|are angry|have to walk}."),
        "{<x> in <town> {are on strike|have stopped working}|in <town>, <x> {went on strike|walked out}}{ on <day>|}",
        (
            "they {want|demand|ask for} <k> percent more{ pay|}",
            "talks {failed|ended|stopped} after <m> hours",
            "it may {last|go on for|take} <m> days",
            "{people|colleagues} {from|in} <other> {support it|help|stand with them}",
            "{people|residents} {have mixed feelings|talk about it}")),
    NewsEvent(
        "{dinosaur bone|Roman coin hoard|sunken ship|cave painting|new beetle|stone age tool|rare orchid|"
        "mass of old letters}",
        "{Researchers|Students|Hikers|Divers} have {found|discovered|come across} "
        "a(n) <x> near <town>{, it was announced on <day>|}.",
        (
            "It is {thought|believed} to be {about|more than} <n>00 years old.",
            "{The find|It} lay only <k> metres {below the ground|from a path}.",
            "The team {from <other> |}had searched {the area |}for <m> years.",
            "It will be {shown|on display} in the {museum|university} of <other>{ from <day>|}.",
            "{Experts|Scholars} call it {a sensation|a stroke of luck|the find of the decade}."),
        "{a(n) <x> {was found|has been discovered} near <town>|{hikers|a team} {came across|discovered} "
        "a(n) <x> near <town>}",
        (
            "it may be {about |over |}<n>00 years old",
            "it lay {just |only |}<k> metres {away|off}",
            "the search {took|lasted|went on for} <m> years",
            "it {will be shown|goes on show|can be seen soon} in <other>",
            "{experts|scholars|people} are {excited|delighted|full of praise}")))

QUOTES = (
    '"{We are {very |}{proud|relieved|shocked|grateful}|This is a {great|sad|hard|special} day for {all of us|'
    "the town}|We will {not give up|need time|rebuild|do all we can}|I have never seen {such a thing|"
    "anything like it}|It could have been worse|Everyone helped|We had hoped for more|There is still {much|a lot} "
    'to do}," {said|told us|explained} <role> <who>.',
    "{<Role> <who>|The <role>, <who>,} {thanked {all helpers|everyone}|spoke of a {turning point|success|tragedy|"
    "surprise}|promised {quick help|an open inquiry|to return|more money}|asked for patience|"
    "was {full of praise|deeply moved|not available}}.")
QUOTE_MENTION = (
    "{<who>, {the|a} <role>, {commented on|spoke about|was asked about} {it|the {event|news}}|"
    "{the |}<role> <who> {commented|gave {a statement|a comment}|was quoted|spoke {up|to the press}|reacted}|"
    "{words|a comment} {came|are quoted} from <role> <who>}")
CLAUSE_JOINT = "{. |. |. |. |, and |; |. {Moreover|Also|Besides|In addition|At the same time|Meanwhile}, }"
SUMMARY_REQUEST = (
    "{Summarise|Summarize|Sum up|Give a {short |}summary of|Write a short summary of|Condense|"
    "What are the main points of|Shorten} {this|the following} {article|text|news story|report}{ in {two|a few} "
    "sentences|}{:|.}")
SUMMARY_OPENING = (
    "{||||In short: |Summary: |The {article|report|text} {says|reports} that |In brief, |"
    "{Here is a|A} {short |}summary: |To sum up, }")


def _article(writer: PhraseWriter, event: NewsEvent, reported: list[int], slots: TemplateSlots) -> str:
    later_sentences = [event.sentences[index] for index in reported]
    later_sentences += writer.sample(QUOTES, writer.number_between(1, 2))
    writer.shuffle(later_sentences)
    return " ".join(writer.sentence(template, **slots) for template in (event.lead, *later_sentences))


def _summary(writer: PhraseWriter, event: NewsEvent, reported: list[int], slots: TemplateSlots) -> str:
    """Return the lead, then what the article reports, in random order, joined in several ways."""
    summary_opening = writer.expand(SUMMARY_OPENING)

    chosen = writer.sample(reported, writer.number_between(2, len(reported)))
    clauses = [event.short_clauses[index] for index in chosen]
    clauses.insert(writer.number_between(0, len(clauses)), QUOTE_MENTION)

    summary_text = writer.expand(event.short_lead, **slots)
    summary_text = writer.continue_text(summary_text, CLAUSE_JOINT, clauses, **slots)
    return after(summary_opening, summary_text) + "."


def news(writer: PhraseWriter) -> DialogueTurns:
    """Return one article to summarise, and its summary."""
    event = writer.choose(EVENTS)
    event_thing, role = writer.expand(event.thing), writer.choose(ROLES)
    quoted_name, third_name = (f"{writer.choose(NAMES)} {family_name(writer.random_source)}" for _ in range(2))
    slots: TemplateSlots = {
        "x": event_thing,
        "town": place_name(writer.random_source),
        "other": place_name(writer.random_source),
        "day": writer.choose(DAYS),
        "n": writer.number_between(11, 98),
        "m": writer.number_between(4, 9),
        "k": writer.number_between(2, 9),
        "who": quoted_name,
        "third": third_name,
        "role": role,
        "Role": capital(role)}

    num_sentences = len(event.sentences)
    reported = writer.sample(range(num_sentences), writer.number_between(3, num_sentences))
    request_text = writer.expand(SUMMARY_REQUEST)
    article_text = _article(writer, event, reported, slots)
    question_paragraphs = [request_text, article_text] if writer.happens(0.8) else [article_text, request_text]

    return ["\n\n".join(question_paragraphs)], [_summary(writer, event, reported, slots)]
