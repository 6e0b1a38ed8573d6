"""A tokenizer.json gives the ids and texts of transformers' tokenizer, and a template its prompts."""
import shutil

import pytest

from model.text import SETTINGS, Stream, Text, silent
from model.tokenizer import BYTE_OF_LETTER, file_tokenizer, rendered
from tests.json_files import change_json, load_json, save_json
from tests.test_text import MIXED, bytelevel, sentencepiece

pytest.importorskip("jinja2", reason="transformers needs it for templates")
transformers = pytest.importorskip("transformers")
TEXTS = [MIXED, "", " ", "   dog", "dog ", "a\r\n\tb", "I 'm here . Don 't !", "<s> x </s>", "<unk><s>",
         "<|eot_id|>dog<|end_of_text|>", "\ud7ff\U0010ffff\x00", "é e\u0301", "<0x41>", "▁ ▁▁"]
END = {"content": "<|eot_id|>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False,
       "special": True}
MARKED = {"__type": "AddedToken", **END, "content": "<s>"}
READ_HERE = [  # a sort of tokenizer.json, and settings
    ("bytes", {}),
    ("bytes", {"pad_token": "<|eot_id|>", "additional_special_tokens": ["<|eot_id|>"]}),
    ("bytes", {"clean_up_tokenization_spaces": True, "add_bos_token": True, "add_eos_token": True}),
    ("bytes", {"added_tokens_decoder": {"2": END}, "model_max_length": 5, "padding_side": "left"}),
    ("bytes", {"tokenizer_class": "Qwen2Tokenizer", "unk_token": None, "pad_token": "<|eot_id|>"}),
    ("bytes", {"tokenizer_class": "GPT2TokenizerFast", "unk_token": "<|eot_id|>", "add_bos_token": True}),
    ("bytes", {"bos_token": None}),
    ("pieces", {}),
    ("pieces", {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}),
    ("pieces", {"add_eos_token": True, "legacy": True, "bos_token": MARKED}),
    ("pieces", {"add_bos_token": False, "add_eos_token": True, "clean_up_tokenization_spaces": True}),
    ("pieces", {"tokenizer_class": "GemmaTokenizer", "pad_token": "</s>"}),
    ("pieces", {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "</s>"})]
READ_BY_TRANSFORMERS = [  # what it adds, changes, or reads in another class
    ("bytes", {"eos_token": "<|new|>"}),
    ("bytes", {"add_prefix_space": True}),
    ("bytes", {"additional_special_tokens": ["dog"]}),
    ("bytes", {"added_tokens_decoder": {"2": {**END, "rstrip": True}}}),
    ("bytes", {"added_tokens_decoder": {"400": {**END, "content": "<|new|>"}}}),
    ("bytes", {"split_special_tokens": True}),
    ("bytes", {"extra_special_tokens": {"image_token": "<|eot_id|>"}}),
    ("bytes", {"tokenizer_class": "BertTokenizer"}),
    ("bytes", {"tokenizer_class": None}),
    ("pieces", {"add_prefix_space": False})]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    pieces = folder / "pieces"
    transformers.LlamaTokenizerFast.from_pretrained(str(sentencepiece(folder / "model"))).save_pretrained(pieces)
    for name in ("special_tokens_map.json", "tokenizer.model"):
        (pieces / name).unlink(missing_ok=True)
    shutil.copy(folder / "model" / "tokenizer_config.json", pieces)
    return {"bytes": bytelevel(folder / "bytes"), "pieces": pieces}


def copied(folders, source, tmp_path, settings):
    folder = shutil.copytree(folders[source], tmp_path / "new")
    change_json(folder / "tokenizer_config.json", **settings)
    return folder


def opened(folder):
    return file_tokenizer(folder, {name: load_json(folder / name) for name in SETTINGS if (folder / name).exists()})


def of_transformers(folder):
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def assert_equal(ours, theirs):
    """Compare all that FlowSpec asks a tokenizer for."""
    for text in TEXTS:
        for adds in (True, False):
            assert ours(text, add_special_tokens=adds)["input_ids"] == theirs(text, add_special_tokens=adds).input_ids
        ids = theirs(text, add_special_tokens=False).input_ids
        for skips in (True, False):
            assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(
                ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        streams = [Stream(ours), Stream(theirs)]
        assert [streams[0].add([number]) for number in ids] == [streams[1].add([number]) for number in ids]
        assert streams[0].finish() == streams[1].finish()
        names = theirs.convert_ids_to_tokens(ids)
        assert ours.convert_ids_to_tokens(ids) == names
        assert ours.convert_tokens_to_string(names) == theirs.convert_tokens_to_string(names)

    several = {"add_special_tokens": False, "return_offsets_mapping": True}
    our_encoding, expected = ours(TEXTS, **several), theirs(TEXTS, **several)
    assert our_encoding["input_ids"] == expected.input_ids and our_encoding["offset_mapping"] == expected.offset_mapping
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    assert set(ours.all_special_ids) == set(theirs.all_special_ids) and silent(ours) == silent(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_tokens_map == theirs.special_tokens_map and ours.chat_template == theirs.chat_template
    assert {number: str(token) for number, token in ours.added_tokens_decoder.items()} == {
        number: str(token) for number, token in theirs.added_tokens_decoder.items()}


@pytest.mark.parametrize("source, settings", READ_HERE)
def test_ids_and_texts_are_those_of_transformers(folders, tmp_path, source, settings):
    folder = copied(folders, source, tmp_path, settings)
    assert_equal(opened(folder), of_transformers(folder))


def test_an_older_form_names_its_tokens_in_a_file_of_their_own(folders, tmp_path):
    folder = copied(folders, "bytes", tmp_path, {})
    save_json(folder / "special_tokens_map.json", {"bos_token": END, "additional_special_tokens": ["<|end_of_text|>"]})
    assert_equal(opened(folder), of_transformers(folder))
    change_json(folder / "tokenizer_config.json", additional_special_tokens=["<|eot_id|>"])
    assert opened(folder) is None


@pytest.mark.parametrize("source, settings", READ_BY_TRANSFORMERS)
def test_what_transformers_may_read_otherwise_is_left_to_it(folders, tmp_path, source, settings):
    assert opened(copied(folders, source, tmp_path, settings)) is None


@pytest.mark.parametrize("name", ["added_tokens.json", "additional_chat_templates/a.jinja"])
def test_files_that_it_does_not_read_leave_a_tokenizer_to_transformers(folders, tmp_path, name):
    folder = copied(folders, "bytes", tmp_path, {})
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    assert opened(folder) is None


def test_truncation_in_a_file_changes_no_text_and_padding_is_left_to_transformers(folders, tmp_path):
    folder = copied(folders, "bytes", tmp_path, {})
    tokenizer = opened(folder).backend_tokenizer
    tokenizer.enable_truncation(2)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert_equal(opened(folder), of_transformers(folder))
    assert_equal(opened(folder), of_transformers(folders["bytes"]))
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert opened(folder) is None


TALK = [{"role": "system", "content": "Be <kind> & 'brief'."}, {"role": "user", "content": "Grüße"},
        {"role": "assistant", "content": "Ho", "tool_calls": [{"function": {"arguments": {"ä": [1, None]}}}]},
        {"role": "user", "content": " dog\n"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b>", "parameters": {"type": "object"}}}]
CALLS = "{% for m in messages %}{{ (m.tool_calls or []) | tojson(indent=2) }}{{ m | tojson }}{% endfor %}"
TEMPLATES = [
    "{{ bos_token }}{{ pad_token }}|{% for m in messages %}\n    {% if loop.first %}\nA{% endif %}\n{{ m.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}{{ tools }}{{ documents is none }}{{ additional_special_tokens }}",
    CALLS, "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{% if loop.last %}{% break %}"
    "{% endif %}{{ m.role }}{% endfor %}",
    "{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}{{ x }}"
    "{% endgeneration %}{% endfor %}{{ x }}",
    "{{ tools | tojson }}{{ tools | tojson(sort_keys=true, separators=(',', ':')) }}{{ enable_thinking }}"
    "{{ eos_token }}",
    "{{ strftime_now('%Y') }}{{ 'ß' | tojson(ensure_ascii=true) }}",
    {"default": "d{{ messages[0].content }}", "tool_use": "t{{ tools | length }}"}]
VARIABLES = [{}, {"tools": TOOLS}, {"enable_thinking": False, "eos_token": "!", "add_generation_prompt": False}]


@pytest.mark.parametrize("variables", VARIABLES, ids=str)
@pytest.mark.parametrize("template", TEMPLATES, ids=str)
def test_a_template_writes_what_transformers_writes(folders, template, variables):
    theirs = of_transformers(folders["bytes"])
    theirs.chat_template = template
    expected = theirs.apply_chat_template(TALK, **{"tokenize": False, "add_generation_prompt": True, **variables})
    assert rendered(template, theirs.special_tokens_map, TALK, variables) == expected


def test_of_several_templates_one_must_be_the_default():
    with pytest.raises(ValueError, match="none is named default: rag, tool_use"):
        rendered({"tool_use": "t", "rag": "r"}, {}, TALK, {})


def test_letters_of_bytes_are_those_of_gpt2():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert BYTE_OF_LETTER == {letter: byte for byte, letter in bytes_to_unicode().items()}


def test_a_list_of_templates_and_a_template_in_a_file_are_read_alike(folders, tmp_path):
    entries = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    folder = copied(folders, "bytes", tmp_path, {"chat_template": entries})
    assert opened(folder).chat_template == of_transformers(folder).chat_template == {"default": "d", "tool_use": "t"}
    (folder / "chat_template.jinja").write_text("a file{{ 1 }}")
    assert Text(folder).tokenizer.chat_template == of_transformers(folder).chat_template == "a file{{ 1 }}"
