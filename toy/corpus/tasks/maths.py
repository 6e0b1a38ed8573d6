"""Arithmetic word problems and their worked answers (the kind called gsm8k); every answer is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from toy.corpus.tasks.facts import GOODS, NAMES
from toy.corpus.tasks.grammar import DialogueTurns, Exchange, PhraseWriter, TemplateSlots, capital

WordProblem = tuple[str, str, int]  # a problem, its solution, and the number that answers it

MEETING_PLACES = ("the market", "the school fair", "the harbour", "the garden", "the library", "the workshop",
                  "the bakery", "the club")

# Each a sentence of the problem and one of the solution. TemplateSlots: `o` is the old number and `v` the new one.
OPENINGS = (
    (
        "{<n> has <a> <t>.|<n> {starts with|owns|collects|brings} <a> <t>{ to <p>|}.|"
        "There are <a> <t> on <n>'s {table|shelf|cart|boat}.}",
        "{At first|To begin with|In the beginning|At the start}{,|} {<n> has <a> <t>|there are <a> <t>}."),
    (
        "<n> {buys|fills|packs|orders|carries} <a> {boxes|bags|crates|baskets|cases} "
        "{with <b> <t> each|of <b> <t>|that hold <b> <t> each}.",
        "{<n> gets|That makes|Together they hold|This gives|The total is} <a> * <b> = <v> <t>"
        "{ in all| to start with| at first|}."),
    (
        "{Every day|Each {morning|evening|week}|Every hour} <n> {makes|sells|finds|paints|wraps} <a> <t>{ at <p>|}. "
        "{<n> does this for|This goes on for|It lasts} <b> {days|weeks|times} in a row.",
        "{In <b> turns|Over this time|After all <b> of them|By the end} "
        "{that is|it comes to|<n> has counted|the sum is} <b> * <a> = <v> <t>."))
ADDITION = (
    "{Then|Later|After that|In the afternoon|The next day}{,|} "
    "{<f> gives them <b> more|<b> more are {found|bought|added|delivered}{ by <f>|}|<f> brings another <b>}.",
    "{Adding the <b> {more|new ones|from <f>} gives|With the <b> extra <t> {there are|we have}|"
    "After <f> helps, the number {grows|rises} to|Then we add <b>:|Next,} <o> + <b> = <v>{ <t>|}.")
SUBTRACTION = (
    "{Then|Later|Sadly|On the way home|In the evening}{,|} <b> {of them|<t>} "
    "{are {lost|sold|eaten|broken|stolen}|get wet|go to <f>|are given to <f>}.",
    "{Taking away the <b>|Without those <b>|Since <b> are gone|After losing <b>|We subtract <b>}, "
    "{<o> - <b> = <v> {are left|remain|stay}|there are <o> - <b> = <v> {left|<t>}|that leaves <o> - <b> = <v>}.")
DIVISION = (
    "{Finally|At last|Now|In the end}{,|} {they|all the <t>} are {shared|split|divided} {equally|fairly|evenly} "
    "{among|between} <k> {friends|children|tables|shops|teams}, and we look at one of these parts.",
    "{Each {part|share|group} {gets|has|is}|One {part|share} is|Dividing by <k> gives|Split into <k>, that is} "
    "<o> / <k> = <v>{ <t>|}.")
PRICE = (
    "{Every one|Each|Each of them} {costs|is sold for|is worth} <p> {coins|dollars|euros}{ to <f>|}.",
    "{At <p> each, {this makes|they bring}|The price is|In money, that is|All of them cost|So the value is} "
    "<o> * <p> = <v>.")
NUMBER_QUESTION = (
    "{How many <t> {are there now|are left|does that make|do we have at the end}|What is the final number of <t>|"
    "How many <t> are there in the end}?")
PRICE_QUESTION = "{How much {money is that|do they cost together}|What is {the total price|everything worth}}?"


@dataclass
class StoryProblem:
    """A story about a number of things that changes from sentence to sentence, and the calculation beside it."""

    writer: PhraseWriter
    slots: TemplateSlots
    number: int = 0
    sentences: list[str] = field(default_factory=list)
    solution_sentences: list[str] = field(default_factory=list)

    def change_number(self, templates: Exchange, new_number: int, **more_slots: object) -> None:
        """Append the sentences of a change to the story and to its solution."""
        slots = {**self.slots, "o": self.number, "v": new_number, **more_slots}
        self.sentences.append(self.writer.expand(templates[0], **slots))
        self.solution_sentences.append(self.writer.expand(templates[1], **slots))
        self.number = new_number

    def begin(self) -> None:
        item_count, group_count = self.writer.number_between(3, 12), self.writer.number_between(2, 9)
        opening_index = self.writer.number_between(0, 2)
        if opening_index == 0:
            item_count, group_count = self.writer.number_between(12, 60), 1
        place_slot = {"p": self.writer.choose(MEETING_PLACES)} if opening_index != 1 else {}
        self.change_number(OPENINGS[opening_index], item_count * group_count, a=item_count, b=group_count, **place_slot)

    def add(self) -> None:
        difference = self.writer.number_between(3, 40)
        self.change_number(ADDITION, self.number + difference, b=difference)

    def subtract(self) -> None:
        difference = self.writer.number_between(2, max(2, self.number // 2))
        self.change_number(SUBTRACTION, self.number - difference, b=difference)

    def divide(self) -> None:
        """Divide the number if it can be divided, or else add to it."""
        divisors = [divisor for divisor in range(2, 11) if self.number % divisor == 0]
        if divisors:
            chosen_divisor = self.writer.choose(divisors)
            self.change_number(DIVISION, self.number // chosen_divisor, k=chosen_divisor)
        else:
            self.add()

    def set_price(self) -> None:
        item_price = self.writer.number_between(2, 9)
        self.change_number(PRICE, self.number * item_price, p=item_price)


def _story(writer: PhraseWriter) -> WordProblem:
    person_name, friend_name = writer.sample(NAMES, 2)
    slots: TemplateSlots = {"n": person_name, "f": friend_name, "t": writer.choose(GOODS)}
    story = StoryProblem(writer, slots)

    story.begin()
    changes = (story.add, story.subtract, story.add, story.subtract, story.divide, story.add)
    for change in writer.sample(changes, writer.number_between(2, 5)):
        change()

    final_question = writer.expand(NUMBER_QUESTION, **slots)
    if story.number < 100 and writer.happens(0.3):
        story.set_price()
        final_question = writer.expand(PRICE_QUESTION)
    return " ".join([*story.sentences, final_question]), " ".join(story.solution_sentences), story.number


JOURNEY_PROBLEM = (
    "<n> {rides|drives|sails|travels|cycles} at <s> km per hour for <h> hours{ without a break|}, "
    "and then {walks|goes|covers} another <r> km. "
    "{How far is the whole {way|trip|journey}|How many km is that in all}?")
JOURNEY_SOLUTION = (
    "{In <h> hours <n> <ride>|The first part is|First we multiply speed by time:|"
    "Distance is speed times time, so it is} <s> * <h> = <w> km. "
    "{Then {come|we add}|After that there are|Adding} <r> km{ more|}{:| gives| makes} <w> + <r> = <v> km.")


def _journey(writer: PhraseWriter) -> WordProblem:
    person_name = writer.choose(NAMES)
    km_per_hour, hours, more_km = (
        writer.number_between(2, 12) * 5, writer.number_between(2, 9), writer.number_between(3, 40))
    first_km = km_per_hour * hours
    total_km = first_km + more_km

    ride_verb = writer.expand("{rides|drives|sails|travels|cycles}")
    slots: TemplateSlots = {"n": person_name, "s": km_per_hour, "h": hours, "r": more_km, "w": first_km, "v": total_km}
    problem_text = writer.expand(JOURNEY_PROBLEM, **slots)
    return problem_text, writer.expand(JOURNEY_SOLUTION, ride=ride_verb, **slots), total_km


# `{older|older}` is a choice too: without its draw, all that follows in the corpus would differ.
AGE_PROBLEM = (
    "<a> is <f> years old. <b> is <t> times as old as <a>, and <c> is <g> years {older|older} than <b>. "
    "{How old is <c>|What is the age of <c>}?")
AGE_SOLUTION = (
    "{<b> is|The age of <b> is|First we find <b>:|Since <a> is <f>, <b> must be} <t> * <f> = <s>{ years old|}. "
    "{So|Then|Therefore|This means that} <c> is <s> + <g> = <v>{ years old| years|}.")


def _age(writer: PhraseWriter) -> WordProblem:
    slots: TemplateSlots = dict(zip("abc", writer.sample(NAMES, 3)))
    first_age, times_older = writer.number_between(3, 12), writer.number_between(2, 4)
    years_between = writer.number_between(2, 15)
    second_age = first_age * times_older
    third_age = second_age + years_between

    slots.update(f=first_age, t=times_older, g=years_between, s=second_age, v=third_age)
    return writer.expand(AGE_PROBLEM, **slots), writer.expand(AGE_SOLUTION, **slots), third_age


PERCENT_PROBLEM = (
    "<n> has <t> <g> and {sells|gives away|loses|paints} <s> percent of them. How many <g> are {left|not touched}?")
PERCENT_SOLUTION = (
    "{<s> percent of <t> is|First take <s> percent of <t>:|The part that goes is} <t> * <s> / 100 = <p>. "
    "{So|Then|What remains is|That leaves} <t> - <p> = <v>{ <g>|}.")


def _percent(writer: PhraseWriter) -> WordProblem:
    person_name, thing = writer.choose(NAMES), writer.choose(GOODS)
    percent, total_count = writer.choose((10, 20, 25, 50)), writer.number_between(2, 15) * 20
    lost_count = total_count * percent // 100
    left_count = total_count - lost_count

    slots: TemplateSlots = {"n": person_name, "g": thing, "s": percent, "t": total_count, "p": lost_count,
                            "v": left_count}
    return writer.expand(PERCENT_PROBLEM, **slots), writer.expand(PERCENT_SOLUTION, **slots), left_count


WORD_PROBLEMS = (_story, _story, _story, _story, _journey, _age, _percent)
QUESTION_LEAD = (
    "{||||Solve this {problem|puzzle|exercise}: |{Please w|W}ork this out step by step: |"
    "Here is a problem for you. |Think carefully. |I need help with my homework. }")
ANSWER_OPENING = (
    "{||||Let us {go|work|take it} step by step. |Let's {think|see|work it out}. |Here is {the|a} solution. |"
    "We can {solve|do} this in {a few|small} steps. |{Sure|Of course|Gladly}. }")
ANSWER_END = (
    "{The {answer|result|final answer} is <v>.|So the {answer|result} is <v>.|Therefore, the answer is <v>.|"
    "#### <v>|Answer: <v>|That gives <v> as the answer.|Hence we get <v>.}")


def maths(writer: PhraseWriter) -> DialogueTurns:
    """Return one problem and its solution."""
    problem_text, solution_text, answer_number = writer.choose(WORD_PROBLEMS)(writer)
    question_text = writer.expand(QUESTION_LEAD) + problem_text
    answer_opening = writer.expand(ANSWER_OPENING)
    answer_end = writer.expand(ANSWER_END, v=answer_number)

    if writer.happens(0.4):
        line_mark = writer.choose(("{}.", "Step {}:", "{})", "-"))
        solution_lines = solution_text.replace(". ", ".\n").split("\n")
        marked_lines = [f"{line_mark.format(number)} {capital(line.strip())}"
                        for number, line in enumerate(solution_lines, 1)]
        return [question_text], ["\n".join([answer_opening.strip(), *marked_lines, answer_end]).strip()]
    return [question_text], [f"{answer_opening}{solution_text} {answer_end}"]
