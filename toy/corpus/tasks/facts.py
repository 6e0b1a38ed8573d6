"""The small world of the dialogues: people, places, animals, jobs, things. Tables, without sentences."""

from __future__ import annotations

import random
from dataclasses import dataclass

NAMES = (
    "Ada Ben Clara Daniel Elena Farid Grace Hugo Ines Jonas Karim Lena Marta Nils Olga Pedro Quinn Rosa Samir "
    "Tara Umar Vera Walter Ximena Yusuf Zoe Alice Bruno Carla Dmitri Emma Felix Greta Hassan Irene Jakob Kate "
    "Liam Maya Noah Otto Paula Ravi Sofia Tom Ursula Victor Wanda Yara Zane Amir Bella Colin Diana Erik Fiona "
    "George Hanna Ivan Julia Kenji Laura Miguel Nadia Oscar Priya Robert Sara Theo Uma Viktor Wendy Anton Bianca "
    "Cyrus Dora Emil Freya Gavin Helga"
).split()

THING_WORDS = {
    "fruits": "apples pears plums cherries grapes oranges lemons bananas melons "
              "peaches figs kiwis mangoes limes apricots",
    "vegetables": "carrots onions peas beans leeks turnips spinach cabbages peppers "
                  "radishes pumpkins beets celery kale",
    "tools": "hammer saw drill wrench pliers chisel screwdriver shovel rake ladder axe file clamp level brush trowel",
    "colours": "red blue green yellow purple orange black white grey pink brown silver gold violet turquoise",
    "instruments": "piano violin guitar flute drum trumpet harp cello clarinet oboe organ banjo tuba accordion",
    "sports": "tennis football swimming rowing skiing cycling boxing fencing hockey golf running climbing judo sailing",
    "furniture": "table chair sofa desk bed shelf stool bench wardrobe lamp cupboard dresser mirror cradle",
    "clothes": "shirt coat scarf hat gloves socks boots skirt trousers jacket belt sweater dress cap sandals",
    "vehicles": "car bus train bicycle tram ferry truck plane scooter van helicopter canoe tractor sledge",
    "trees": "oak pine birch maple willow cedar elm ash beech poplar spruce walnut chestnut olive fir",
    "drinks": "tea coffee water milk lemonade cocoa juice cider soda broth",
    "metals": "iron copper gold silver tin zinc lead nickel aluminium titanium mercury",
    "birds": "robin crow owl eagle swan heron sparrow finch gull falcon stork magpie wren pigeon",
    "emotions": "joy anger fear pride hope envy grief calm shame surprise relief boredom",
}
THINGS_OF = {category: words.split() for category, words in THING_WORDS.items()}

GOODS = (
    "apples pears books pencils stamps marbles shells stickers cups plates candles tiles bricks eggs cakes "
    "muffins tickets coins cards buttons roses tulips bottles chairs lamps notebooks balloons toys beads kites "
    "postcards spoons sandwiches"
).split()

OPPOSITES = dict(pair.split("/") for pair in (
    "hot/cold big/small fast/slow light/dark early/late rich/poor happy/sad strong/weak loud/quiet young/old hard/soft "
    "high/low open/closed full/empty clean/dirty dry/wet brave/timid cheap/expensive sharp/blunt thick/thin near/far "
    "sweet/bitter kind/cruel calm/nervous simple/complex deep/shallow smooth/rough wide/narrow heavy/light polite/rude"
).split())

# animal: habitat, food, class, lifespan in years, known for
ANIMALS = {
    "owl": ("old barns", "mice", "bird", 12, "hunting at night"),
    "fox": ("woods", "rabbits", "mammal", 5, "its bushy tail"),
    "otter": ("rivers", "fish", "mammal", 10, "floating on its back"),
    "eagle": ("high cliffs", "fish and hares", "bird", 20, "its sharp eyes"),
    "bear": ("mountain forests", "berries and salmon", "mammal", 25, "sleeping through the winter"),
    "frog": ("ponds", "flies", "amphibian", 8, "its long jumps"),
    "camel": ("deserts", "thorny plants", "mammal", 40, "going without water for days"),
    "penguin": ("icy coasts", "krill", "bird", 20, "swimming although it cannot fly"),
    "tiger": ("jungles", "deer", "mammal", 15, "its striped coat"),
    "turtle": ("warm seas", "sea grass", "reptile", 80, "its hard shell"),
    "bee": ("hives", "nectar", "insect", 1, "making honey"),
    "wolf": ("cold forests", "elk", "mammal", 8, "hunting in packs"),
    "horse": ("grassy plains", "hay", "mammal", 28, "running fast"),
    "whale": ("open oceans", "plankton", "mammal", 70, "its songs"),
    "goat": ("rocky hills", "leaves", "mammal", 16, "climbing steep slopes"),
    "snake": ("dry grassland", "eggs and mice", "reptile", 9, "shedding its skin"),
    "bat": ("caves", "moths", "mammal", 18, "finding its way by sound"),
    "hedgehog": ("gardens", "beetles", "mammal", 4, "rolling into a ball"),
    "spider": ("corners of houses", "insects", "arachnid", 2, "spinning webs"),
    "beaver": ("streams", "bark", "mammal", 11, "building dams"),
    "parrot": ("rain forests", "seeds and nuts", "bird", 50, "copying voices"),
    "salmon": ("northern rivers", "shrimp", "fish", 6, "swimming upstream"),
    "squirrel": ("city parks", "acorns", "mammal", 7, "hiding its food"),
    "elephant": ("savannas", "grass and roots", "mammal", 65, "its long memory"),
    "shark": ("coral reefs", "seals", "fish", 30, "its rows of teeth"),
    "koala": ("gum trees", "eucalyptus leaves", "mammal", 14, "sleeping most of the day"),
}

# job: place, tool, activity, requirement
JOBS = {
    "baker": ("a bakery", "an oven", "makes bread and cakes", "early rising"),
    "nurse": ("a hospital", "a thermometer", "cares for sick people", "patience"),
    "carpenter": ("a workshop", "a saw", "builds things out of wood", "a steady hand"),
    "teacher": ("a school", "a blackboard", "helps children to learn", "clear words"),
    "farmer": ("a farm", "a tractor", "grows crops and keeps animals", "strength"),
    "pilot": ("an airport", "a flight plan", "flies planes", "good eyesight"),
    "librarian": ("a library", "a catalogue", "lends books", "order"),
    "plumber": ("people's homes", "a wrench", "repairs pipes", "flexibility"),
    "chef": ("a restaurant", "sharp knives", "cooks meals", "a fine sense of taste"),
    "painter": ("a studio", "a brush", "paints pictures", "imagination"),
    "engineer": ("an office", "a computer", "designs machines", "mathematics"),
    "gardener": ("a park", "a spade", "looks after plants", "a love of nature"),
    "sailor": ("a ship", "a compass", "steers across the sea", "courage"),
    "tailor": ("a small shop", "needle and thread", "sews clothes", "an eye for detail"),
    "doctor": ("a clinic", "a stethoscope", "treats patients", "years of study"),
    "firefighter": ("a fire station", "a hose", "puts out fires", "quick thinking"),
    "journalist": ("a newsroom", "a notebook", "writes about the news", "curiosity"),
    "astronomer": ("an observatory", "a telescope", "studies the stars", "calm nights"),
    "mechanic": ("a garage", "a jack", "repairs cars", "technical sense"),
    "musician": ("a concert hall", "an instrument", "plays music", "daily practice"),
    "shepherd": ("the hills", "a dog", "watches over sheep", "endurance"),
    "judge": ("a court", "the law", "decides cases", "fairness"),
}

# country: capital, continent, language
COUNTRIES = {
    "France": ("Paris", "Europe", "French"), "Spain": ("Madrid", "Europe", "Spanish"),
    "Italy": ("Rome", "Europe", "Italian"), "Germany": ("Berlin", "Europe", "German"),
    "Poland": ("Warsaw", "Europe", "Polish"), "Greece": ("Athens", "Europe", "Greek"),
    "Portugal": ("Lisbon", "Europe", "Portuguese"), "Norway": ("Oslo", "Europe", "Norwegian"),
    "Sweden": ("Stockholm", "Europe", "Swedish"), "Egypt": ("Cairo", "Africa", "Arabic"),
    "Kenya": ("Nairobi", "Africa", "Swahili"), "Japan": ("Tokyo", "Asia", "Japanese"),
    "China": ("Beijing", "Asia", "Chinese"), "Thailand": ("Bangkok", "Asia", "Thai"),
    "Vietnam": ("Hanoi", "Asia", "Vietnamese"), "Peru": ("Lima", "South America", "Spanish"),
    "Chile": ("Santiago", "South America", "Spanish"), "Cuba": ("Havana", "North America", "Spanish"),
    "Hungary": ("Budapest", "Europe", "Hungarian"), "Finland": ("Helsinki", "Europe", "Finnish"),
}

NAME_STARTS = (
    "Al Bel Cor Dun El Fal Gar Hol Is Kel Lor Mar Nor Ost Pel Quen Ras Sel Tor Ul Vel Wes Yar Zan Bri Cas Dra Fen"
).split()
NAME_MIDDLES = "a e i o u an en or ar is am il ov et un".split()
TOWN_ENDS = (
    "ton ford wick dale mere holm berg ville stead mouth bury gate haven moor field port sund crest ness by"
).split()
FAMILY_ENDS = "son ner ley man ski ova ez ini berg well ton ard wood ko mont sen stein rick dez low".split()
REGIONS = ("the north", "the south", "the east", "the west", "the lake district", "the highlands", "the river valley",
           "the coastal plain", "the island province", "the green hills")
TOWN_GOODS = ("cheese", "clocks", "glass", "wool", "salt", "bells", "pottery", "oysters", "apples", "ships", "paper",
              "violins", "honey", "lace", "marble", "tea", "boots", "mustard", "silk", "lanterns")
SIGHTS = ("an old stone bridge", "a white lighthouse", "a round tower", "a covered market", "a botanical garden",
          "a wooden church", "a clock museum", "a ruined castle", "a long pier", "a blue fountain", "a water mill",
          "a narrow-gauge railway", "a sculpture park", "a planetarium")
FEASTS = ("the lantern night", "the harvest fair", "the boat race", "the kite days", "the wool market",
          "the snow dance", "the bread feast", "the summer choir", "the masked parade", "the apple week")
DEEDS = ("invented a quiet water pump", "wrote the novel The Long Road", "mapped the northern coast",
         "discovered a comet", "founded the first free school", "designed the great bridge", "composed nine symphonies",
         "bred a hardy wheat", "crossed the desert alone", "painted the winter series", "built a flying boat",
         "led the miners' strike", "translated the old songs", "found a cure for marsh fever", "won three chess titles",
         "drew the first star atlas")


@dataclass(frozen=True)
class Town:
    name: str
    region: str
    river: str
    good: str
    sight: str
    feast: str
    year: int
    people: int


@dataclass(frozen=True)
class Person:
    name: str
    job: str
    town: str
    year: int
    deed: str


def _invented_name(random_source: random.Random, num_without_middle: int, endings: list[str]) -> str:
    middles = NAME_MIDDLES + [""] * num_without_middle
    return "".join(random_source.choice(options) for options in (NAME_STARTS, middles, endings))


def place_name(random_source: random.Random) -> str:
    return _invented_name(random_source, 8, TOWN_ENDS)


def family_name(random_source: random.Random) -> str:
    return _invented_name(random_source, 6, FAMILY_ENDS)


def _make_towns(random_source: random.Random, num_towns: int) -> list[Town]:
    town_names = sorted({place_name(random_source) for _ in range(3 * num_towns)})
    random_source.shuffle(town_names)

    def make_town(town_name: str) -> Town:
        return Town(
            name=town_name,
            region=random_source.choice(REGIONS),
            river=place_name(random_source)[:6].rstrip("aeiou") + "a",
            good=random_source.choice(TOWN_GOODS),
            sight=random_source.choice(SIGHTS),
            feast=random_source.choice(FEASTS),
            year=random_source.randint(11, 19) * 100 + random_source.randint(0, 9) * 10,
            people=random_source.randint(2, 95) * 1000)

    return [make_town(town_name) for town_name in town_names[:num_towns]]


def _make_person(random_source: random.Random, towns: list[Town]) -> Person:
    return Person(
        name=f"{random_source.choice(NAMES)} {family_name(random_source)}",
        job=random_source.choice(sorted(JOBS)),
        town=random_source.choice(towns).name,
        year=random_source.randint(1700, 1960),
        deed=random_source.choice(DEEDS))


# One fixed world, so that models can memorize the answers to questions without a passage.
_WORLD_SOURCE = random.Random(1789)
TOWNS = _make_towns(_WORLD_SOURCE, 40)
PEOPLE = [_make_person(_WORLD_SOURCE, TOWNS) for _ in range(50)]
