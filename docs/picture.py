"""Draws step.svg, the picture of one training step: python docs/picture.py"""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT = 1060, 730
LEFT, UNIT = 165, 50  # where time begins, and one unit of it
LANES = {"current": (80, "current stream", "of PyTorch"), "cast": (190, "cast stream", "private")}
LANES["communication"] = (300, "communication", "of NCCL or Gloo")
BANDS = {"param": (400, "parameter.data"), "weight": (455, "module.weight"), "low": (510, "leaf.grad")}
BANDS["grad"] = (565, "parameter.grad")
BAR = 40
BLUE, ORANGE, GREEN, GREY, PURPLE = "#cfe2f9", "#ffdfb8", "#d3efcf", "#e6e6e6", "#e8d9f7"


def x(time: float) -> float:
    return LEFT + UNIT * time


def text(left: float, top: float, words: str, anchor: str = "middle", size: int = 16, weight: str = "normal") -> str:
    return f'<text x="{left:g}" y="{top:g}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">{words}</text>'


def box(top: float, begin: float, end: float, words: str, color: str) -> str:
    left, right = x(begin), x(end)
    shape = f'<rect x="{left:g}" y="{top}" width="{right - left:g}" height="{BAR}" rx="4" fill="{color}" stroke="#777"/>'
    return shape + text((left + right) / 2, top + BAR / 2 + 5, words, size=15)


def work(lane: str, begin: float, end: float, words: str, color: str) -> str:
    return box(LANES[lane][0], begin, end, words, color)


def arrow(from_lane: str, begin: float, to_lane: str, end: float, words: str = "", side: int = 1) -> str:
    top, bottom = LANES[from_lane][0], LANES[to_lane][0]
    y1, y2 = (top + BAR, bottom) if top < bottom else (top, bottom + BAR)
    line = f'<path d="M{x(begin):g} {y1} L{x(end):g} {y2}" stroke="#b02a2a" stroke-width="1.6" marker-end="url(#head)"/>'
    anchor = "start" if side > 0 else "end"
    return line + (text(x((begin + end) / 2) + 6 * side, (y1 + y2) / 2 + 4, words, anchor, 17) if words else "")


def band(name: str, begin: float, end: float, words: str, color: str) -> str:
    return box(BANDS[name][0], begin, end, words, color)


def lines() -> list[str]:
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="DejaVu Sans, sans-serif">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#b02a2a"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for begin, end, words in ((0.2, 7.5, "forward"), (7.5, 16.25, "backward"), (16.25, 17.75, "step")):
        out.append(f'<path d="M{x(begin) + 3:g} 52 H{x(end) - 3:g}" stroke="#444" stroke-width="1.5"/>')
        out.append(text((x(begin) + x(end)) / 2, 42, words, size=18, weight="bold"))
    for top, name, what in LANES.values():
        out.append(f'<path d="M{LEFT} {top + BAR / 2:g} H{WIDTH - 20}" stroke="#ccc" stroke-dasharray="4 4"/>')
        out += [text(12, top + 17, name, "start", 17, "bold"), text(12, top + 36, what, "start", 12)]
    for top, name in BANDS.values():
        out.append(text(12, top + 25, name, "start", 16, "bold"))
    out += [
        work("cast", 0.6, 1.6, "cast", ORANGE),
        work("cast", 1.6, 3.1, "cast", ORANGE),
        work("cast", 3.1, 4.6, "cast", ORANGE),
        work("current", 4.9, 7.3, "layers 1 ... n", BLUE),
        work("current", 7.6, 8.8, "layer n", BLUE),
        work("current", 8.8, 9.65, "pack", GREEN),
        work("current", 9.65, 11.1, "middle", BLUE),
        work("current", 11.1, 11.95, "pack", GREEN),
        work("current", 11.95, 13.15, "layer 1", BLUE),
        work("current", 13.15, 14.0, "pack", GREEN),
        work("current", 15.3, 16.2, "finish", GREEN),
        work("current", 16.3, 17.7, "update", GREY),
        work("communication", 9.7, 11.7, "reduce", PURPLE),
        work("communication", 12.0, 13.5, "reduce", PURPLE),
        work("communication", 13.95, 15.25, "reduce", PURPLE),
        arrow("current", 0.3, "cast", 0.7, "1", -1),
        arrow("cast", 4.6, "current", 5.0, "2", 1),
        arrow("current", 9.5, "communication", 9.9, "3", 1),
        arrow("current", 11.8, "communication", 12.2),
        arrow("current", 13.9, "communication", 14.1),
        arrow("communication", 15.2, "current", 15.45, "4", 1),
        band("param", 0.2, 17.75, "master in float32, at any time", BLUE),
        band("weight", 0.2, 0.5, "", BLUE),
        band("weight", 0.5, 7.45, "leaf in bfloat16", ORANGE),
        band("weight", 7.55, 15.3, "leaf again, for checkpoints that compute anew", ORANGE),
        band("weight", 15.3, 17.75, "master", BLUE),
        band("low", 7.55, 14.0, "bfloat16, until its bucket is packed", ORANGE),
        band("grad", 0.2, 15.3, "None, or what earlier backwards left", BLUE),
        band("grad", 15.3, 17.75, "average", BLUE),
        text(12, 640, "1  casts begin after what the current stream did before, such as the optimizer's writes", "start", 16),
        text(12, 664, "2  the forward begins when its casts are done", "start", 16),
        text(
            12,
            688,
            "3  a bucket is packed and its reduction starts when its last gradient is there; backward goes on",
            "start",
            16,
        ),
        text(
            12,
            712,
            "4  the end of backward waits for the averages, and hands them over as full-precision gradients",
            "start",
            16,
        ),
        "</svg>",
    ]
    return out


if __name__ == "__main__":
    Path(__file__).with_name("step.svg").write_text("\n".join(lines()) + "\n", encoding="utf-8")
