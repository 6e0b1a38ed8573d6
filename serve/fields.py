"""Fields of OpenAI's, vLLM's, SGLang's and llama.cpp's protocols that would change an answer, but are not supported.

Fields that neither stand here nor in `protocol` change no text of an answer, and are ignored.
"""
from __future__ import annotations

from typing import Any, Mapping, Sequence

_OPENAI = """
    functions function_call best_of suffix modalities audio prediction web_search_options images""".split()
_VLLM = """
    use_beam_search min_tokens stop_token_ids bad_words allowed_token_ids logprob_token_ids prompt_logprobs
    include_stop_str_in_output truncate_prompt_tokens continue_final_message documents chat_template
    mm_processor_kwargs media_io_kwargs thinking_token_budget watermarking repetition_detection
    guided_whitespace_pattern""".split()
_SGLANG = """
    stop_regex no_stop_trim lora_path session_params custom_logit_processor custom_params input_ids
    structural_tag task""".split()
_LLAMA_CPP = """
    repeat_penalty typical_p typ_p tfs_z mirostat dry_multiplier xtc_probability top_n_sigma dynatemp_range
    samplers min_keep n_indent n_probs t_max_predict_ms t_max_prompt_ms lora image_data grammar_lazy
    adaptive_target""".split()
REFUSED = (*_OPENAI, *_VLLM, *_SGLANG, *_LLAMA_CPP)  # values that are 0 or empty change nothing ...

HARMLESS: Mapping[str, Sequence[Any]] = {  # ... nor do these
    "function_call": ("none", "auto"),
    **dict.fromkeys(("repeat_penalty", "best_of", "typical_p", "typ_p", "tfs_z"), (1,)),
    **dict.fromkeys(("top_n_sigma", "t_max_predict_ms", "t_max_prompt_ms", "adaptive_target"), (-1,)),
    "modalities": (["text"],)}

ALWAYS_TRUE = ("skip_special_tokens", "add_generation_prompt")  # true is what the server does


def unsupported_field(body: Mapping[str, Any]) -> str:
    """Return the first field of a body that would change the answer, but is not supported; empty: none."""
    for name in REFUSED:
        if body.get(name) and body[name] not in HARMLESS.get(name, ()):
            return name
    return next((name for name in ALWAYS_TRUE if body.get(name, True) is not True), "")
