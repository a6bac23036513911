"""The picture of the live page in the README: the scene of its tests, light and dark side by side.

PYTHONPATH=. python tests/unit/server/live_picture.py docs/live_page.png
"""

from __future__ import annotations

import asyncio
import io
import sys
import tempfile
from functools import partial
from pathlib import Path

from PIL import Image

if __name__ == "__main__":
    sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from live_scene import stage_scene
from test_live_page_in_chromium import opened

WIDTH, HEIGHT = 1500, 1290
"""CSS pixels of one page; what is below is left out."""
SCALE = 0.55


async def take(path: Path) -> None:
    """Write the PNG."""
    with tempfile.TemporaryDirectory() as directory:
        async with opened(Path(directory), prepare=partial(stage_scene, last_name="law")) as (_, page):
            await page.click("[data-window='1800']")
            pictures = []
            for scheme in ("light", "dark"):
                await page.look(width=WIDTH, height=HEIGHT, scheme=scheme)
                await page.until(f"document.querySelector('#plot-al svg').viewBox.baseVal.width > {WIDTH - 200}")
                whole = Image.open(io.BytesIO(await page.screenshot(Path(directory) / f"{scheme}.png")))
                pictures.append(whole.convert("RGB").crop((0, 0, WIDTH, HEIGHT)))
    beside = Image.new("RGB", (2 * WIDTH, HEIGHT))
    for index, picture in enumerate(pictures):
        beside.paste(picture, (index * WIDTH, 0))
    small = beside.resize((round(SCALE * beside.width), round(SCALE * beside.height)), Image.Resampling.LANCZOS)
    small.quantize(palette=palette_of(small), dither=Image.Dither.NONE).save(path, optimize=True)


def palette_of(picture: Image.Image) -> Image.Image:
    """256 colours: the commonest, which fill areas, and as many spread over all there are, for lines and marks."""
    number = 128
    counts = picture.getcolors(picture.width * picture.height)
    common = [colour for _, colour in sorted(counts, reverse=True)[:number]]
    spread = picture.quantize(number, method=Image.Quantize.MAXCOVERAGE).getpalette()
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for colour in common for value in colour] + spread)
    return palette


if __name__ == "__main__":
    asyncio.run(take(Path(sys.argv[1])))
