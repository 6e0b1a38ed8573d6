"""Other people's clients against a live server: each gets the text of a seed, whole and streamed.

They stand in an environment of their own, which scripts/check_clients.sh makes; elsewhere these tests are skipped.
"""
import json
import os
from pathlib import Path

import pytest

from config.presets import ROOT
from tests.json_files import save_json
from tests.saved import run_program
from tests.serving import QUESTION, server, text_of

__all__ = ["server"]  # a fixture
CLIENTS = Path(os.environ.get("FLOWSPEC_CLIENTS", ROOT / ".venv-clients")) / "bin"
HOW = "bash scripts/check_clients.sh installs the clients"
pytestmark = pytest.mark.skipif(not CLIENTS.exists(), reason=f"there is no {CLIENTS}: {HOW}")
SAMPLED = {"temperature": 0.8, "seed": 5, "max_tokens": 24}
READ = "import json, sys; url, question, sampled = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]); "
LANGCHAIN = READ + """
from langchain_openai import ChatOpenAI
chat = ChatOpenAI(base_url=url, api_key="none", model="toy", max_retries=0, **sampled)
whole, found = chat.invoke(question), chat.bind(logprobs=True).invoke(question).response_metadata["logprobs"]
print(json.dumps({"whole": whole.content, "streamed": "".join(piece.content for piece in chat.stream(question)),
                  "tokens": whole.usage_metadata["output_tokens"], "logprobs": len(found["content"])}))
"""
LITELLM = READ + """
import litellm
litellm.suppress_debug_info = True
asked = {"model": "openai/toy", "api_base": url, "api_key": "none", "num_retries": 0, **sampled,
         "messages": [{"role": "user", "content": question}]}
whole = litellm.completion(**asked, logprobs=True)
chunks = list(litellm.completion(stream=True, **asked))
try:
    litellm.completion(**asked, best_of=2)
except litellm.BadRequestError as error:
    refused = str(error)
try:
    litellm.completion(**{**asked, "messages": [{"role": "user", "content": "fox " * 5000}]})
except litellm.ContextWindowExceededError as error:
    refused += str(error)
print(json.dumps({"whole": whole.choices[0].message.content, "tokens": whole.usage.completion_tokens,
                  "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
                  "logprobs": len(whole.choices[0].logprobs.content), "refused": refused}))
"""


@pytest.fixture(scope="module")
def text(server):
    """What the server writes with the options of SAMPLED."""
    return text_of(server.chat(**SAMPLED))


@pytest.fixture
def run(tmp_path):
    """Runs a client's command, which reaches nothing but this machine; what it prints."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LLM_USER_PATH": str(tmp_path),
                   "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1",
                   "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}

    def printed(name, *words):
        if not (CLIENTS / name).exists():
            pytest.skip(f"there is no {CLIENTS / name}: {HOW}")
        done = run_program(CLIENTS / name, *words, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout
    return printed


@pytest.mark.parametrize("program", [LANGCHAIN, LITELLM], ids=["langchain-openai", "litellm"])
def test_a_library_gets_the_text_of_the_seed_whole_and_streamed(server, text, run, program):
    got = json.loads(run("python", "-I", "-c", program, f"{server.url}/v1", QUESTION, json.dumps(SAMPLED)))
    assert got["whole"] == got["streamed"] == text
    assert got["tokens"] == got["logprobs"] == SAMPLED["max_tokens"]
    if program is LITELLM:
        assert "best_of is not supported" in got["refused"] and "maximum context length" in got["refused"]


@pytest.mark.parametrize("streamed", [True, False])
def test_the_command_llm_prints_the_text_of_the_seed(server, text, run, tmp_path, streamed):
    model = {"model_id": "flowspec", "model_name": "toy", "api_base": f"{server.url}/v1"}
    save_json(tmp_path / "extra-openai-models.yaml", [model])
    options = [word for key, value in SAMPLED.items() for word in ("-o", key, str(value))]
    how = [] if streamed else ["--no-stream"]
    assert run("llm", "-m", "flowspec", *how, *options, QUESTION) == f"{text}\n"
