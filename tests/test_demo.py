"The demo page in a real browser: chat, see tokens stream, see the page map move, fire the burst"
import shutil, warnings
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
try: from playwright.sync_api import sync_playwright
except ImportError: sync_playwright = None
MISSING = "no Chromium on the PATH (Debian: apt-get install chromium)" if not CHROMIUM else "playwright is not installed" if not sync_playwright else None
if MISSING: warnings.warn(f"the demo page is NOT tested in a browser: {MISSING}")
browser_only = pytest.mark.skipif(MISSING is not None, reason=f"the demo page is not tested: {MISSING}")


def test_the_page_is_whole():
    "Also without a browser: one file, nothing from elsewhere, and every element that the script asks for is there"
    import re
    from minisgl_edu.server import demo_page
    html = demo_page()
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)|url\(|@import|https?://""", html)
    ids = set(re.findall(r'\bid="(\w+)"', html))
    assert set(re.findall(r'\$\("(\w+)"\)', html)) <= ids and "innerHTML" not in html


@pytest.fixture(scope="module")
def server(model_dir):
    from minisgl_edu.launch import start_server
    with start_server(model=str(model_dir), port=0, max_running_requests=32, max_seq_len=512, page_size=16, num_pages=400, max_prefill_length=256) as handle: yield handle


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    "The page, open, in a browser that reaches nothing but our server; fails on any script error"
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page, foreign, errors = context.new_page(), [], []
    page.set_default_timeout(60_000)
    def route(r):
        if r.request.url.startswith(server.url): return r.continue_()
        foreign.append(r.request.url); r.abort()
    page.route("**/*", route)
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" and "400" not in m.text else None)
    page.goto(server.url)
    yield page
    context.close()
    assert not foreign and not errors


def ask(page, text):
    "Type a question and send it, with the keyboard alone"
    page.focus("#prompt")
    page.keyboard.press("Control+a")
    page.keyboard.type(text)
    page.keyboard.press("Enter")


@browser_only
def test_chat_streams_and_the_page_map_moves(page):
    page.wait_for_function("document.querySelector('#map').dataset.pages && document.querySelector('#model').textContent.includes('512')")
    page.evaluate("document.querySelector('#temperature').value = 0")
    before = page.get_attribute("#map", "data-pages")
    page.evaluate("window.seen = []; new MutationObserver(() => seen.push(document.querySelector('.assistant')?.textContent)).observe(document.querySelector('#log'), {childList: true, subtree: true, characterData: true})")
    ask(page, "What is the capital of France?")
    page.wait_for_selector(".note:has-text('tokens, first after')")
    answer = page.text_content(".assistant")
    seen = [s for s in dict.fromkeys(page.evaluate("seen")) if s]
    assert "Paris" in answer and len(seen) >= 4 and all(answer.startswith(s) for s in seen), seen  # it grew piece by piece
    page.wait_for_function("b => document.querySelector('#map').dataset.pages !== b", arg=before)
    assert page.evaluate("(c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x))(document.querySelector('#map'))")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.wait_for_function("document.querySelector('#hits').textContent !== '–' && document.querySelector('#ttft').textContent !== '–'")


@browser_only
def test_escape_stops_an_answer_and_errors_are_shown(page):
    page.evaluate("for (const [k, v] of [['max_tokens', 400], ['temperature', 0]]) document.querySelector('#' + k).value = v")
    ask(page, "Write a long story about the sea.")
    page.wait_for_function("document.querySelector('.assistant')?.textContent.length > 10")
    page.keyboard.press("Escape")
    page.wait_for_selector(".note:has-text('stopped')")
    page.wait_for_function("document.querySelector('#running').textContent === '0'")  # the engine has stopped too
    page.evaluate("document.querySelector('#max_tokens').value = 5000")
    ask(page, "Hi")
    page.wait_for_selector(".error:has-text('max_tokens')")
    page.click("#reset")
    assert page.locator(".turn").count() == 0


@browser_only
def test_a_burst_of_32_runs_together(page):
    page.wait_for_selector("#map[data-pages]")
    page.evaluate("window.most = 0; window.states = new Set(); setInterval(() => { most = Math.max(most, +document.querySelector('#running').textContent || 0); for (const c of document.querySelector('#map').dataset.pages) states.add(c) }, 50)")
    page.focus("#burst")
    page.keyboard.press("Space")
    page.wait_for_function("document.querySelector('#burst-note').textContent.startsWith('32 requests')", timeout=250_000)
    assert page.locator(".tile.done").count() == 32
    assert page.evaluate("most") > 8 and page.evaluate("[...states].sort().join('')") == ".csu"  # free, cached, shared and in use were all seen
    assert page.locator("#burst").is_enabled()


@browser_only
def test_it_fits_a_phone_and_follows_the_dark(page):
    page.wait_for_selector("#map[data-pages]")
    page.set_viewport_size({"width": 360, "height": 740})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    names = page.evaluate("[...document.querySelectorAll('button, input, textarea, canvas')].filter(e => !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label'))).length")
    assert names == 0  # everything can be named by a screen reader
