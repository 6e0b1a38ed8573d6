"""The presets: a name for a model and the options that go with it.

Paths begin at the repository's folder, so a preset works in every working directory. All models but the bundled one
lie under one root, in folders named as at Hugging Face.
"""
from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from config.drafts import BEST_DRAFT
from config.methods import BEST_METHOD
from config.run_config import RunConfig

ROOT = Path(__file__).resolve().parent.parent  # the repository
HOME = Path(os.environ.get("FLOWSPEC_HOME") or ROOT).expanduser().absolute()  # for models, splits, results and keys
MODELS_FOLDER = Path(RunConfig().models).expanduser() if RunConfig().models else HOME / "models"
TOY = ROOT / "toy"
SMOLLM2, TOY_PRESET = "smollm2", "toy"  # the default preset, and the one if that cannot be downloaded
DEMO = "demo"  # the bundled model on an emulated cluster
CONVERSATION = {SMOLLM2: {"temperature": 0.2, "top_p": 0.9}}  # from the model's card; its GGUF file has none
STORY_PROMPT = "Tell me a short story about a curious fox called Maya."


def _hub(base_name: str, head_name: str, stages: str, template: str) -> RunConfig:
    with_draft = RunConfig(eagle_dir=str(MODELS_FOLDER / head_name)) if head_name else RunConfig(draft="suffix")
    base_dir = str(MODELS_FOLDER / base_name)
    return replace(with_draft, base_dir=base_dir, prompt=STORY_PROMPT, stages=stages, template=template)


_BUNDLED = RunConfig(base_dir=str(TOY / "llama"), eagle_dir=str(TOY / "eagle_deep"), ssm=str(TOY / "draft_a"),
                     stages="0+2+2+2+2", prompt=STORY_PROMPT)
PRESETS = {
    SMOLLM2: RunConfig(base_dir=str(MODELS_FOLDER / "smollm2-135m"), eagle_dir=str(ROOT / "smollm2" / "eagle"),
                       draft=BEST_DRAFT, stages="0+7+7+8+8", prompt="What is photosynthesis?"),
    # on a CPU, each row and each drafted level of such a small model costs time, so only likely guesses pay
    TOY_PRESET: replace(_BUNDLED, min_probability=0.1, expand_depth=2, ablate="none_expand"),
    DEMO: replace(_BUNDLED, pipeline_type=BEST_METHOD, draft=BEST_DRAFT, profile="jetson-7b", live=True),
    # the models of the FlowSpec paper
    "vicuna-7b": _hub("lmsys/vicuna-7b-v1.3", "yuhuili/EAGLE-Vicuna-7B-v1.3", "0+8+8+8+8", "vicuna"),
    "vicuna-13b": _hub("lmsys/vicuna-13b-v1.3", "yuhuili/EAGLE-Vicuna-13B-v1.3", "0+10+10+10+10", "vicuna"),
    "llama2-7b": _hub("meta-llama/Llama-2-7b-chat-hf", "yuhuili/EAGLE-llama2-chat-7B", "0+8+8+8+8", "llama-2"),
    "llama2-13b": _hub("meta-llama/Llama-2-13b-chat-hf", "yuhuili/EAGLE-llama2-chat-13B", "0+10+10+10+10", "llama-2"),
    # later models, which have large embeddings, so that equal numbers of layers are not equal in bytes
    "llama3-8b": _hub("meta-llama/Meta-Llama-3-8B-Instruct", "yuhuili/EAGLE-LLaMA3-Instruct-8B", "auto:4", "own"),
    "llama3.1-8b": _hub("meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "auto:4", "own"),
    "r1-distill-llama-8b": _hub("deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
                                "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B", "auto:4", "own"),
    **{f"qwen3-{size.lower()}": _hub(f"Qwen/Qwen3-{size}", f"AngelSlim/Qwen3-{size}_eagle3", "auto:4", "own")
       for size in ("1.7B", "4B", "8B", "14B", "32B")},
    "qwen3-30b-a3b": _hub("Qwen/Qwen3-30B-A3B", "AngelSlim/Qwen3-a3B_eagle3", "auto:4", "own"),
    "gpt-oss-20b": _hub("openai/gpt-oss-20b", "RedHatAI/gpt-oss-20b-speculator.eagle3", "auto:4", "own"),
    # no published heads are known
    "gemma-3-12b": _hub("google/gemma-3-12b-it", "", "auto:4", "own"),
    **{f"lfm2-{size.lower()}": _hub(f"LiquidAI/LFM2-{size}", "", "auto:4", "own") for size in ("1.2B", "8B-A1B")},
    "qwen3-next-80b-a3b": _hub("Qwen/Qwen3-Next-80B-A3B-Instruct", "", "auto:4", "own"),
    # heads that guess blocks
    **{f"qwen3.5-{size.lower()}": _hub(f"Qwen/Qwen3.5-{size}", f"z-lab/Qwen3.5-{size}-DFlash", "auto:4", "own")
       for size in ("4B", "9B", "27B", "35B-A3B")},
}


def under(preset: RunConfig, root: str) -> RunConfig:
    """Return the preset with its models under another root."""
    def moved(folder_path: str) -> str:
        if MODELS_FOLDER not in Path(folder_path).parents:
            return folder_path
        return str(Path(root) / Path(folder_path).relative_to(MODELS_FOLDER))

    return replace(preset, models=root, base_dir=moved(preset.base_dir), eagle_dir=moved(preset.eagle_dir))
