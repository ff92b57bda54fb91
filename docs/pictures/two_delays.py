"""The two delays of DuDe, step by step, from a simulated run with three workers: python docs/pictures/two_delays.py.

It writes the same picture twice: two_delays.svg, which moves on its own and can be shown anywhere, and two_delays.html,
which the site puts in its place, with a button for each update.
"""

from __future__ import annotations

from pathlib import Path

import dualdelay as dd
from dualdelay.engine.delays import delay_grids
from dualdelay.engine.result import Run

HERE = Path(__file__).parent
TIMES, UPDATES = [1.0, 2.45, 3.5], 8
SECONDS = 4  # that a step is shown
LEFT, WIDTH, TOP, ROW = 76, 302, 70, 62  # where the time axis begins, how long it is, and the rows of the workers
FULL, HEIGHT = 480, TOP + 3 * ROW + 62
STYLE = """
.two-delays svg, svg.two-delays { --ink: #1a1a1a; --faint: #6b6b6b; --line: #c9c9c9; --paper: #fff;
  --w0: #0067a5; --w1: #b34700; --w2: #00704f; font: 15px system-ui, sans-serif; max-width: 640px; width: 100%;
  height: auto; display: block; }
.two-delays text { fill: var(--ink); } .two-delays .faint { fill: var(--faint); }
.two-delays .job { stroke-width: 1.5; fill: var(--paper); } .two-delays .used { stroke-width: 1.5; }
.two-delays .on { fill: var(--paper); font-weight: 600; } .two-delays .middle { text-anchor: middle; }
.two-delays .bold { font-weight: 600; } .two-delays .big { font-size: 16px; }
.two-delays .axis { stroke: var(--line); } .two-delays .now { stroke: var(--ink); stroke-width: 2; }
.two-delays .tau { stroke-width: 3; } .two-delays .d { stroke-width: 3; stroke-dasharray: 2 3; }
"""
DARK = "--ink: #f0f0f0; --faint: #b0b0b0; --line: #5a5a5a; --paper: #16181b; --w0: #6cb8f0; --w1: #f2975a; --w2: #4fc79b;"


def the_run() -> Run:
    """Three workers, the slowest three and a half times as slow as the fastest, until all jobs drawn have ended."""
    problem = dd.Quadratic([[0.0], [6.0], [12.0]])
    return dd.simulate(dd.DuDe(lr=0.1), problem, dd.FixedSpeeds(TIMES), updates=2 * UPDATES)


def drawn(run: Run) -> str:
    """What the picture consists of: what is always there, and a group for each update."""
    arrivals = list(run.trace.rows())
    tau, data = delay_grids(run.trace, 3)
    made = {0: 0.0} | {row["after"]: row["time"] for row in arrivals if 0 < row["after"] <= UPDATES}
    end_of_time = made[UPDATES]
    scale = WIDTH / end_of_time

    def x(time: float) -> float:
        return round(LEFT + time * scale, 1)

    def y(worker: int) -> int:
        return TOP + worker * ROW

    line = f'x1="{LEFT}" x2="{x(end_of_time)}" y1="{TOP - 25}" y2="{TOP - 25}"'
    parts = [f'<text x="4" y="{TOP - 20}">server</text>', f'<line class="axis" {line}/>']
    for version, time in made.items():
        parts.append(f'<circle cx="{x(time)}" cy="{TOP - 25}" r="3.5" fill="var(--ink)"/>')
        parts.append(f'<text class="middle bold" x="{x(time)}" y="{TOP - 36}">{version}</text>')
    parts.append(f'<text class="faint middle" x="{LEFT + WIDTH + 54}" y="{TOP - 42}">delay of</text>')
    parts.append(f'<text class="faint middle" x="{LEFT + WIDTH + 34}" y="{TOP - 20}">model</text>')
    parts.append(f'<text class="faint middle" x="{LEFT + WIDTH + 80}" y="{TOP - 20}">data</text>')
    parts.extend(f'<text x="4" y="{y(worker) + 19}">worker {worker + 1}</text>' for worker in range(3))
    for row in arrivals:
        begin, end, worker = x(row["time"] - row["seconds"]), x(min(row["time"], end_of_time)), row["worker"]
        if end - begin < 4:
            continue
        box = f'x="{begin + 1}" y="{y(worker)}" width="{round(end - begin - 2, 1)}" height="28" rx="4"'
        under_way = ' stroke-dasharray="4 3"' * (row["time"] > end_of_time)
        parts.append(f'<rect class="job" {box} stroke="var(--w{worker})"{under_way}/>')
        parts.append(f'<text class="middle" x="{(begin + end) / 2:.1f}" y="{y(worker) + 19}">{row["version"]}</text>')
    for t in range(1, UPDATES + 1):
        now, step = x(made[t]), [f'<g class="step step-{t}">']
        step.append(f'<line class="now" x1="{now}" x2="{now}" y1="{TOP - 25}" y2="{y(2) + 48}"/>')
        step.append(f'<circle cx="{now}" cy="{TOP - 25}" r="6" fill="var(--ink)"/>')
        for worker in range(3):
            taken, came = t - int(tau[t - 1, worker]), made[t - int(data[t - 1, worker])]
            row = next(row for row in arrivals if row["worker"] == worker and row["version"] == taken)
            begin, end = x(row["time"] - row["seconds"]), x(row["time"])
            colour, below = f"var(--w{worker})", y(worker) + 36
            box = f'x="{begin + 1}" y="{y(worker)}" width="{round(end - begin - 2, 1)}" height="28" rx="4"'
            step.append(f'<rect class="used" {box} fill="{colour}" stroke="{colour}"/>')
            step.append(f'<text class="middle on" x="{(begin + end) / 2:.1f}" y="{y(worker) + 19}">{taken}</text>')
            step.append(f'<line class="tau" x1="{begin + 1}" x2="{now}" y1="{below}" y2="{below}" stroke="{colour}"/>')
            step.append(f'<line class="d" x1="{x(came)}" x2="{now}" y1="{below + 8}" y2="{below + 8}" stroke="{colour}"/>')
            for value, place in ((tau[t - 1, worker], 34), (data[t - 1, worker], 80)):
                step.append(f'<text class="middle bold big" x="{LEFT + WIDTH + place}" y="{y(worker) + 20}">{value}</text>')
        first = [row["worker"] + 1 for row in arrivals if row["after"] == t]
        who = "all three have reported" if t == 1 else f"worker {first[0]} has reported"
        step.append(f'<text class="bold big" x="4" y="{HEIGHT - 38}">Update {t}: {who}.</text>')
        one, two, three = (t - int(tau[t - 1, worker]) for worker in range(3))
        words = f"It follows the mean of gradients taken at models {one}, {two} and {three}."
        step.append(f'<text x="4" y="{HEIGHT - 14}">{words}</text>')
        parts.append("\n".join([*step, "</g>"]))
    return "\n".join(parts)


def animation(steps: int, where: str) -> str:
    """The steps in turn, or the last one where a person wants nothing to move."""
    shown = f"{100 / steps:.4f}%"
    rules = [
        f"@keyframes two-delays {{ 0%, {shown} {{ opacity: 1; }} {100 / steps + 0.001:.4f}%, 100% {{ opacity: 0; }} }}",
        f"{where} .step {{ opacity: 0; animation: two-delays {steps * SECONDS}s infinite; }}",
        *(f"{where} .step-{t} {{ animation-delay: {(t - 1) * SECONDS}s; }}" for t in range(1, steps + 1)),
        "@media (prefers-reduced-motion: reduce) {",
        f"  {where} .step {{ animation: none; }} {where} .step-{steps} {{ opacity: 1; }}",
        "}",
    ]
    return "\n".join(rules) + "\n"


def pictures() -> dict[Path, str]:
    """Both files."""
    run = the_run()
    body, steps = drawn(run), range(1, UPDATES + 1)
    about = "Three workers over time, the gradients that each update of the server uses, and how old each of them is"
    head = f'<svg class="two-delays" viewBox="0 0 {FULL} {HEIGHT}" role="img" aria-label="{about}"'
    dark = f"@media (prefers-color-scheme: dark) {{ svg.two-delays {{ {DARK} }} }}\n"
    alone = f"{STYLE}{dark}{animation(UPDATES, '.two-delays')}svg.two-delays {{ background: var(--paper); }}\n"
    picked = "".join(f".two-delays #update-{t}:checked ~ svg .step-{t} {{ opacity: 1; }}\n" for t in steps)
    site = f"""{STYLE}body[data-theme="dark"] .two-delays svg {{ {DARK} }}
@media (prefers-color-scheme: dark) {{ body:not([data-theme="light"]) .two-delays svg {{ {DARK} }} }}
.two-delays {{ border: 1px solid var(--color-background-border); border-radius: 6px; padding: 0.6rem; margin: 1rem 0; }}
.two-delays svg {{ --paper: var(--color-background-primary); margin-top: 0.6rem; }}
.two-delays input {{ position: absolute; opacity: 0; }}
.two-delays label {{ display: inline-block; min-width: 1.6rem; padding: 0.2rem 0.45rem; margin: 0.1rem; text-align: center;
  border: 1px solid var(--color-foreground-border); border-radius: 4px; cursor: pointer; }}
.two-delays input:checked + label {{ background: var(--color-brand-primary); color: var(--color-background-primary); }}
.two-delays input:focus-visible + label {{ outline: 3px solid var(--color-brand-content); outline-offset: 2px; }}
.two-delays .step {{ opacity: 0; }}
{animation(UPDATES, ".two-delays #update-play:checked ~ svg")}{picked}"""
    names = {"play": "play", **{str(t): str(t) for t in steps}}
    buttons = "\n".join(
        f'<input type="radio" name="update" id="update-{name}"{" checked" * (name == "play")}>'
        f'<label for="update-{name}">{label}</label>'
        for name, label in names.items()
    )
    inline = head.replace(' class="two-delays"', "")
    return {
        HERE / "two_delays.svg": f'{head} xmlns="http://www.w3.org/2000/svg">\n<style>{alone}</style>\n{body}\n</svg>\n',
        HERE / "two_delays.html": f'<style>{site}</style>\n<div class="two-delays" role="group" aria-label="Updates">\n'
        f"<span>Update </span>\n{buttons}\n{inline}>\n{body}\n</svg>\n</div>\n",
    }


if __name__ == "__main__":
    for path, text in pictures().items():
        path.write_text(text)
