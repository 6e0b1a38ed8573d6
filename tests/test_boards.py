"""Files that describe a cluster: whatever one says, it is a cluster or refused in one sentence."""
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config.profiles import FIELD_KINDS, PROFILES, Profile, read
from tests.checkpoints import refused
from tests.json_files import json_values

NEAR = st.integers(-1, 3) | st.floats(0, 9) | st.sampled_from(["eagle", "ssm1", "jetson-7b", ""])
VALUES = json_values() | NEAR | st.lists(NEAR, max_size=4) | st.lists(st.lists(NEAR, max_size=4), max_size=3)
KEYS = st.sampled_from([*FIELD_KINDS]) | st.text(max_size=9)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("boards") / "site.json"


def refusal(path, content):
    """What is said of a file with this text, or nothing if it is a cluster."""
    path.write_text(content)
    read.cache_clear()
    try:
        cluster = read(str(path))
    except ValueError as error:
        return str(error)
    assert isinstance(cluster, Profile)
    assert cluster.slowed(2).board(1).link(0, 1).stage(0.5, 4, 9) > 0
    return ""


@settings(derandomize=True)
@given(field=KEYS, value=VALUES, more=st.dictionaries(KEYS, VALUES, max_size=2))
def test_any_json_in_any_field_is_a_cluster_or_refused_in_one_sentence(path, field, value, more):
    said = refusal(path, json.dumps({"like": "jetson-7b",
                                     "factors": [1, 1], **more, field: value}))
    assert not said or (said.startswith(str(path)) and ": " in said
                        and "\n" not in said and len(said) < 900), said


@pytest.mark.parametrize("content, sentence", [
    ('{"like": [1]}', 'says like=[1]: write one of jetson-7b, jetson-13b'),
    ('{"like": "wifi", "mbps": null}', 'says mbps=None: write a number from 0.001 to 1e+06'),
    ('{"like": "wifi", "wires": 1}', "has the unknown key 'wires': write some of like, about"),
    ('{"like": "wifi", "levels": [["eagel", 3]]}', "each of them a list of draft (eagle, dflash, dspark, model"),
    ('{"like": "wifi", "levels": [["eagle", 3], ["eagle", 4]]}', "gives levels of eagle, eagle: give each draft only"),
    ('{"like": "wifi", "factors": [1], "links": [[-1, 1, 2, 3]]}', "rank (a whole number from 0 to 1024)"),
    ('{"like": "wifi", "links": [[1, 2, 3, 4]]}', "names board 2, but has only 0: give factors or memory for each"),
    ('{"like": "wifi", "like": "server"}', "is not JSON (the key 'like' occurs 2 times)"),
    ('{"like": "wifi", "own_times": [1, 2]}', "says own_times=[1, 2]: write a list of ms of a message (a number"),
    ('{"like": "wifi", "jitter": -1}', "says jitter=-1: write a number from 0 to 1e+07"),
    ('{"like": "wifi", "loss": 1.5}', "says loss=1.5: write a number from 0 to 0.9"),
    ('{"like": "wifi", "repeat": -1}', "says repeat=-1: write a number from 0 to 1e+07"),
    ('{"like": "wifi", "layers": 100000}', "write a whole number from 1 to 65536"),
    ("{}", '"like" with one of jetson-7b, jetson-13b')])
def test_what_no_cluster_has_is_refused_with_what_is_allowed(path, content, sentence):
    path.write_text(content)
    read.cache_clear()
    with refused(sentence):
        read(str(path))


@pytest.mark.parametrize("name", PROFILES)
def test_a_cluster_may_be_like_any_profile_and_has_its_times(path, name):
    path.write_text(json.dumps({"like": name}))
    read.cache_clear()
    assert read(str(path)) == PROFILES[name]
