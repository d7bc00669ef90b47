"""lm-eval's results for a model are those of its logits, text by text; the solves are counted."""

import json
import math
import os
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from corpus import train_tokenizer
from processes import output_of
from small_models import contractive_llama, contractive_mamba2
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm

pytestmark = pytest.mark.evaluation

SCRIPT = Path(__file__).parents[2] / "examples" / "evaluate.py"
STORIES = [
    f"{name} has a {colour} {thing}. {weather} {name} met {friend}. Then {name} gave {friend} the "
    f"{thing}."
    for name, friend, thing in (("Ann", "Bo", "ball"), ("Christopher", "Ann", "umbrella"))
    for colour in ("red", "blue")
    for weather in ("It rained.", "The sun was shining all day long.")
]
KINDS = ("implicit mamba2", "explicit mamba2", "implicit llama", "explicit llama")


@cache
def tokenizer(kind="plain"):
    """A byte-level BPE: ``plain``; one that ``adds bos``; one that has ``none``."""
    made = train_tokenizer(STORIES, 300)
    if kind == "none":
        made.bos_token = made.eos_token = made.pad_token = None
    elif kind == "adds bos":
        parts = {"single": "<|endoftext|> $A", "special_tokens": [("<|endoftext|>", 0)]}
        made.backend_tokenizer.post_processor = TemplateProcessing(**parts)
    return made


def model(kind):
    """In float64; solves converge."""
    make = {"mamba2": contractive_mamba2, "llama": contractive_llama}[kind.split()[1]]
    if kind.startswith("implicit"):
        solve = dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-7, max_steps=200))
        core = dq.ImplicitModel(make(weight_norm=False), solve)
    else:
        core = dq.ExplicitModel(make(injection=False, weight_norm=False))
    return from_causal_lm(dq.CausalLM(300, core), eos_token_id=0).double().eval()


def evaluated(kind, words="plain", **options):
    """lm-eval's model."""
    from deqseq.integrations.lm_eval import SolvedLM  # of an extra that the other tests do without

    return SolvedLM(model(kind), tokenizer(words), **options)


def ask(lm, request, *arguments):
    from lm_eval.api.instance import Instance

    instances = [Instance(request, {}, one, n) for n, one in enumerate(arguments)]
    return getattr(lm, request)(instances, disable_tqdm=True)


def ask_rolling(lm, texts):
    return ask(lm, "loglikelihood_rolling", *((text,) for text in texts))


def by_hand(lm, before, after):
    """Log-probability of tokens behind others, and whether each is the likeliest."""
    with torch.no_grad():
        logits = lm.model(torch.tensor([[*before, *after[:-1]]])).logits[0, -len(after) :]
    nats = cross_entropy(logits, torch.tensor(after), reduction="sum").item()
    return pytest.approx(-nats, abs=1e-8), logits.argmax(-1).tolist() == after


# passages without their last word, and that word
QUESTIONS = [(story[: story.rindex(" ")], story[story.rindex(" ") :]) for story in STORIES]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        *((kind, "plain") for kind in KINDS),
        ("implicit llama", "adds bos"),
        ("implicit llama", "none"),
    ],
)
def test_continuations_are_scored_as_by_hand(kind, words):
    lm = evaluated(kind, words, batch_size=5)
    first = [0] if words == "adds bos" else []
    encode = tokenizer().encode
    answers = ask(lm, "loglikelihood", *QUESTIONS)
    for (context, target), answer in zip(QUESTIONS, answers, strict=True):
        before = encode(context)
        after = encode(context + target)[len(before) :]
        assert answer == by_hand(lm, first + before, after)


@pytest.mark.parametrize("words", ["plain", "adds bos"])
@pytest.mark.parametrize("longest", [1000, 7])
def test_whole_texts_are_predicted_token_by_token_each_once(words, longest):
    lm = evaluated("implicit mamba2", words, max_length=longest, batch_size=3)
    texts = [*STORIES[:3], "Ann met Bo."]
    for text, answer in zip(texts, ask_rolling(lm, texts), strict=True):
        ids = [0, *tokenizer().encode(text)]  # the end of text stands before
        total = 0.0
        for begin, end in pairwise([*range(0, len(ids) - 1, longest), len(ids) - 1]):
            # a last window that is short sees more of what came before
            before = ids[max(0, end - longest) : begin + 1]
            total += by_hand(lm, before, ids[begin + 1 : end + 1])[0].expected
        assert answer == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("kind", ["implicit mamba2", "implicit llama"])
@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sliding(3)])
def test_the_batch_decides_nothing_and_only_texts_are_counted(kind, sweep):
    solve = {"sweep": sweep, "stop": dq.Stop(rtol=1e-4, max_steps=200)}
    one, many = (evaluated(kind, solve=solve, batch_size=size) for size in (1, 16))
    context, target = QUESTIONS[0]
    asked = QUESTIONS + [(f"{letter} {context}", target) for letter in "xyz"]  # of one length
    alone, together = (ask(lm, "loglikelihood", *asked) for lm in (one, many))
    assert [nats for nats, _ in together] == pytest.approx([nats for nats, _ in alone], abs=1e-10)
    rows = [torch.tensor([tokenizer().encode(before + after)[:-1]]) for before, after in asked]
    with torch.no_grad():
        stats = [one.model(row, solve=solve).stats for row in rows]
    steps = torch.cat([each.iterations.flatten() for each in stats]).double()
    for lm in (one, many):
        numbers = lm.tally()
        assert numbers["self_iterations"] == pytest.approx(steps.mean().item())
        assert numbers["converged"] == 1
        assert lm.counted["converged of"] == len(rows)
        assert lm.counted["token_updates of"] == steps.numel()  # and no padding
    evaluations = one.tally()["evaluations"]
    assert many.tally()["evaluations"] < evaluations == sum(each.evaluations for each in stats)


PROMPTS = ("Ann", "Bo has a red", "Christopher met Ann. Then")


def continued(lm):
    options = {"until": ["\n\n"], "max_gen_toks": 5}
    return ask(lm, "generate_until", *((prompt, options) for prompt in PROMPTS))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_unequal_length_are_continued_as_alone(kind):
    lm = evaluated(kind, batch_size=3)
    words = tokenizer()
    for prompt, answer in zip(PROMPTS, continued(lm), strict=True):
        ids = words.encode(prompt)
        for _ in range(5):
            with torch.no_grad():
                ids.append(lm.model(torch.tensor([ids])).logits[0, -1].argmax().item())
        text = words.decode(ids).removeprefix(prompt)
        assert answer == text.partition("<|endoftext|>")[0].partition("\n\n")[0]
    assert lm.tally()["converged"] == {"implicit": 1, "explicit": None}[kind.split()[0]]


@pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")
def test_generation_is_solved_as_told_and_padding_is_not_counted():
    solve = {"sweep": "Sliding", "stop": {"max_steps": 2, "rtol": 0.0}}
    lm = evaluated("implicit mamba2", solve=solve, batch_size=3)
    continued(lm)
    prompted = sum(len(tokenizer().encode(prompt)) for prompt in PROMPTS)
    # the last of five tokens needs no solve
    assert lm.counted["self_iterations of"] == prompted + 3 * 4
    assert lm.counted["converged of"] == 3 * 5
    assert lm.tally()["converged"] == 0
    assert lm.tally()["converged_tokens"] == 0


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(ValueError, match="an empty context needs a token to begin with"):
        ask_rolling(evaluated("explicit mamba2", "none"), ["Ann"])
    short = evaluated("explicit mamba2", max_length=4)
    with pytest.raises(ValueError, match=r"a continuation of \d+ tokens is longer than"):
        ask(short, "loglikelihood", ("Ann", " has a red ball. It rained."))


def test_the_command_line_of_lm_eval_has_our_models(tmp_path):
    model("implicit mamba2").float().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    lines = [json.dumps({"text": story}) + "\n" for story in STORIES]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    task = f"""
        task: own
        dataset_path: json
        dataset_kwargs:
          data_files: {{test: {tmp_path}/data.jsonl}}
          cache_dir: {tmp_path}/cache
        test_split: test
        doc_to_text: ""
        doc_to_target: text
        output_type: loglikelihood_rolling
        metric_list: [{{metric: bits_per_byte}}]
    """
    (tmp_path / "own.yaml").write_text(dedent(task))
    solve = {"sweep": "Sequential", "stop": {"max_steps": 1, "rtol": 0.0}}
    given = json.dumps({"pretrained": str(tmp_path / "model"), "solve": solve})
    flags = f"--include_path {tmp_path} --output_path {tmp_path}/out --tasks own --batch_size 4"
    command = f"{SCRIPT} run --model deqseq {flags} --model_args".split()
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    printed = output_of(*command, given, timeout=600, env=env)
    (path,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(path.read_text())
    nats = sum(ask_rolling(evaluated("implicit mamba2", solve=solve), STORIES))
    bits = -nats / math.log(2) / len("".join(STORIES).encode())
    assert found["results"]["own"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)
    assert found["config"]["solves"]["self_iterations"] == 1
    assert "solves: " in printed
