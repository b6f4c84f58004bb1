"""The page of headline claims: each with the command, commit and data that it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.common import saved


@dataclass(frozen=True)
class Claim:
    """A headline claim and its evidence."""

    words: str
    result: str
    section: str


CLAIMS = (
    Claim(
        "The shipped private model, drafted, over lan: with everything from launch to end but the "
        "hint 26.0 times less time than the same GPT-2 compiled whole by SPU (30 asked: missed), "
        "with it 23.7; online 38.3 times",
        "completions_lan",
        "completions#complete-generations-on-lan",
    ),
    Claim(
        "Over loopback 19.5 times less with everything but the hint (20 asked: missed), with it "
        "16.9; medians of sixteen runs beside eight of stock",
        "completions",
        "completions#cost-of-a-token-complete-generations",
    ),
    Claim(
        "SmolLM2-135M-Instruct, which somebody else trained, answers between two processes: the "
        "first token after 106 s in the mean of four questions, a later one 3.4 s online and 1.8 "
        "ahead in the mean of seven in which no tile of the cache is made, on a host of middling "
        "speed",
        "smollm2",
        "published-model",
    ),
    Claim(
        "Its drafts, 4 a step, save a little over lan: three answers of 16 tokens take 1.09 to "
        "1.22 times less time with everything, for 2.2 to 2.5 times the bytes; a later token 1.24 "
        "to 1.40 times less online, for 3.1 to 3.6 times",
        "smollm2_drafted",
        "published-model#what-drafts-save-of-an-answer",
    ),
    Claim(
        "On shares its likeliest token is float32's at 99.52% of 1,050 positions (98.9 to 99.8; 99 "
        "asked), with correlated randomness from a dealer; of 200 between two processes at 98.00% "
        "(95.0 to 99.2)",
        "fidelity_dealt",
        "published-model",
    ),
    Claim(
        "Vault mode: its answers give the prompt away, 640 of 640 tokens after one generated token",
        "attack_layer0_vault",
        "confidential#what-a-models-owner-finds-out",
    ),
    Claim(
        "Fakes as published do not hide a prompt: the row that gives the others is found 80 of 100 "
        "times, where guessing finds 11.14%",
        "attack_rank_published",
        "confidential#what-a-models-owner-finds-out",
    ),
    Claim(
        "InvisibleInk on a small model: the criterion does not hold here, a baseline has the best "
        "MAUVE at every epsilon",
        "dp_text",
        "private-text",
    ),
    Claim(
        "NOIR's codebook at the paper's noise: what it keeps, costs and loses to attacks",
        "noir",
        "split#what-a-codebook-costs-and-what-it-keeps",
    ),
    Claim(
        "The watermark's criterion holds at temperature 1; at 0.5 the default, with a history, "
        "misses the AUC (0.965, 0.97 asked), and as published it has 0.984; a mark is no signature",
        "watermark",
        "watermark",
    ),
)


def paragraphs() -> list[str]:
    """Return the claims as one Markdown list, for docs/results/README.md."""
    return ["\n".join(_line(claim) for claim in CLAIMS)]


def _line(claim: Claim) -> str:
    page, _, section = claim.section.partition("#")
    made = list(saved.machines(saved.load(claim.result)))
    commits = ", ".join(sorted({machine["commit"] for machine in made}))
    dates = sorted(machine["date"][:10] for machine in made)
    days = " to ".join(sorted({dates[0], dates[-1]}))
    link = f"{page}.md" + (f"#{section}" if section else "")
    return (
        f"- {claim.words}: [all of it]({link}). `{saved.load('index')[claim.result]['command']}`, "
        f"commit {commits}, {days}, {saved.link(claim.result)}."
    )
