"""The chat page in a browser, on a service whose streams the test writes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from browser import Browser, Page, browser, find_chromium
from http_live import Live, live, wait_until
from scripted_service import ScriptedService, Step

from ortolan.errors import EngineError, OverloadedError
from ortolan.runtime.params import Request, TokenEvent, Usage

pytestmark = pytest.mark.slow

MARKUP = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>"
PHONE = {"width": 360, "height": 640}


class Talk(ScriptedService):
    """Keeps what it was asked. `steps`: what each request's stream has, at first a short answer."""

    def __init__(self) -> None:
        super().__init__(self._script)
        self.name = "a-model-whose-name-no-phone-has-room-for"
        self.steps: list[Step] = said("It is", " Paris.")
        self.asked: list[list[tuple[str, str]]] = []
        self.requests: list[Request] = []

    def _script(self, request: Request) -> list[Step]:
        self.requests.append(request)
        return self.steps

    async def encode_chat(self, messages: Any) -> list[int]:
        self.asked.append([(one["role"], one["content"]) for one in messages])
        return [5]


def said(*texts: str, end: str | None = "stop") -> list[Step]:
    """An answer's events, with its usage on the last; without `end` the stream stays open."""
    usage = Usage(prompt_tokens=31, completion_tokens=len(texts), cached_tokens=16)
    steps: list[Step] = [TokenEvent(text, (5,)) for text in texts]
    if end is not None:
        steps[-1] = TokenEvent(texts[-1], (5,), end, usage)  # type: ignore[arg-type]
    return steps


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no Chromium here; install it (apt-get install chromium)")
    with browser(program, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def talk() -> Talk:
    return Talk()


@pytest.fixture
def served(talk: Talk) -> Iterator[Live]:
    with live(talk) as server:
        yield server


@pytest.fixture
def page(chromium: Browser, served: Live) -> Iterator[Page]:
    """The page, greeted by its server; at the end, the browser must have had nothing to object."""
    tab = chromium.page()
    tab.look()
    tab.open(f"{served.url}/")
    tab.wait("context")
    yield tab
    assert tab.complaints == []
    assert all(one.startswith(served.url) for one in tab.requested if one[:5] != "data:")


def ask(page: Page, text: str) -> None:
    """Ask, and wait for the end."""
    page.type(text)
    page.press("Enter")
    page.wait("!stopper && document.querySelector('.question')")


def close_settings(page: Page) -> None:
    """As by keyboard, which puts it back to where one types."""
    page.press("Escape")
    page.wait("!settings.open && document.activeElement === prompt")


def answer(page: Page) -> str:
    return page.text(".answer:last-of-type .text")


def figure(page: Page, name: str) -> str:
    return page.text(f".answer:last-of-type [data-figure={name}] dd")


def test_answer_streams_and_says_what_it_took(page: Page, served: Live, talk: Talk) -> None:
    """The figures are what the page is for: how fast, how soon, how much was cached."""
    talk.steps = said("It", " is", " Paris", end=None)
    page.type("Where?")
    page.press("Enter")
    page.wait("document.querySelector('.text').innerText === 'It is Paris'")
    assert page.js("document.getElementById('send').hidden")
    time.sleep(0.05)  # so that there is a span of time to divide by

    async def end() -> None:
        (stream,) = talk.streams
        stream.put(TokenEvent(".", (5,), "stop", Usage(31, 4, 16)))
        talk.finish(stream, None)

    served.run(end())
    page.wait("!stopper")
    assert answer(page) == "It is Paris."
    assert page.text(".question") == "Where?"
    assert figure(page, "tokens") == "4"
    assert figure(page, "prompt") == "31"
    assert figure(page, "cached") == "16"
    assert float(figure(page, "rate").replace(",", "")) < 3 / 0.05
    assert figure(page, "ttft").endswith("ms")
    assert page.text("#context") == "35 of 64 tokens used"
    assert page.js("document.getElementById('status').textContent") == "Answer: It is Paris."
    talk.steps = said("No.")
    ask(page, "And then?")
    assert talk.asked[1] == [
        ("user", "Where?"),
        ("assistant", "It is Paris."),
        ("user", "And then?"),
    ]


def test_markup_from_anywhere_stays_text(page: Page, talk: Talk) -> None:
    """A model repeats what it has read; what it repeats must not run in its reader's browser."""
    fenced = f"`{MARKUP}`\n```html {MARKUP}\n{MARKUP}\n```\n{MARKUP}"
    talk.steps = said(fenced)
    ask(page, MARKUP)
    assert page.text(".question") == MARKUP
    assert answer(page).count("<b>bold</b>") == 3
    assert page.text(".answer pre") == MARKUP
    talk.steps = [EngineError(MARKUP)]
    ask(page, "again")
    assert "<b>bold</b>" in page.text(".problem")
    assert page.js("document.querySelectorAll('img, b').length") == 0
    assert "taken" not in page.js("document.title")


def test_policy_stops_markup_even_if_the_page_would_set_it(page: Page) -> None:
    """The policy is the second wall, for the day when somebody writes innerHTML."""
    set_it = "document.body.innerHTML = 'x'"
    assert (
        page.js(f"(() => {{ try {{ {set_it} }} catch (e) {{ return e.name }} }})()") == "TypeError"
    )
    page.forget()  # the browser's complaint about this test's own doing


@pytest.mark.parametrize("how", ["key", "button"])
def test_stopping_frees_the_slot_and_keeps_what_came(page: Page, talk: Talk, how: str) -> None:
    """A long answer that nobody wants must not hold a slot until its end."""
    talk.steps = said("So", " far", end=None)
    page.type("Where?")
    page.press("Enter")
    page.wait("document.querySelector('.text').innerText === 'So far'")
    if how == "key":
        page.press("Escape")
    else:
        page.click("#stop")
    page.wait("!stopper")
    wait_until(lambda: talk.cancelled == 1)
    assert answer(page) == "So far"
    assert page.text("[data-figure=end]") == "stopped"
    talk.steps = said("Well.")
    ask(page, "Go on")
    assert talk.asked[1][:2] == [("user", "Where?"), ("assistant", "So far")]


def test_settings_go_with_the_request(page: Page, talk: Talk) -> None:
    """A setting that the page shows and does not send would be a lie about the answer."""
    page.click("#open-settings")
    for name, value in {
        "system": "Be brief.",
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "40",
        "max_tokens": "7",
        "seed": "11",
    }.items():
        page.js(f"document.getElementById({name!r}).select()")
        page.type(value)
    close_settings(page)
    ask(page, "Where?")
    params = talk.requests[0].params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 40)
    assert (params.max_tokens, params.seed) == (7, 11)
    assert talk.asked[0] == [("system", "Be brief."), ("user", "Where?")]
    page.click("#open-settings")
    page.click("#defaults")
    close_settings(page)
    ask(page, "Where?")
    assert talk.requests[1].params.temperature == 1.0
    assert talk.asked[1][0] == ("user", "Where?")


def test_setting_that_cannot_be_is_shown_and_not_sent(page: Page, talk: Talk) -> None:
    page.js("document.getElementById('top_p').value = '1.5'")
    ask_in_vain = "document.getElementById('prompt').value === 'Where?' && settings.open"
    page.type("Where?")
    page.press("Enter")
    page.wait(ask_in_vain)
    assert page.js("document.activeElement.id") == "top_p"
    assert talk.requests == []


def test_refusal_is_a_sentence_and_the_question_comes_back(page: Page, talk: Talk) -> None:
    """Typing it again would be the reader's work for the server's trouble."""
    talk.steps = [OverloadedError("too many requests are waiting", retry_after_s=3)]
    ask_and_lose = "!stopper && document.querySelector('.problem')"
    page.type("Where?")
    page.press("Enter")
    page.wait(ask_and_lose)
    assert page.text(".problem").startswith("Too many requests are waiting")
    assert page.js("document.getElementById('prompt').value") == "Where?"
    assert page.text(".question") == ""
    talk.steps = said("Paris.")
    page.press("Enter")
    page.wait("!stopper && document.querySelector('.answer')")
    assert answer(page) == "Paris."
    assert talk.asked[-1] == [("user", "Where?")]


def test_failure_in_the_middle_keeps_what_came(page: Page, talk: Talk) -> None:
    talk.steps = [*said("Half", end=None), EngineError("the engine stopped working")]
    ask(page, "Where?")
    assert answer(page) == "Half"
    assert page.text("[data-figure=end]") == "not complete"
    assert "engine stopped" in page.text(".problem")


def test_trying_again_replaces_the_answer(page: Page, talk: Talk) -> None:
    ask(page, "Where?")
    talk.steps = said("Elsewhere.")
    page.click(".again")
    page.wait("!stopper && document.querySelector('.text').innerText === 'Elsewhere.'")
    assert page.js("document.querySelectorAll('.answer').length") == 1
    assert talk.asked[1] == talk.asked[0]


def test_new_conversation_forgets_the_old_one(page: Page, talk: Talk) -> None:
    talk.steps = said("So", end=None)
    page.type("Where?")
    page.press("Enter")
    page.wait("document.querySelector('.text').innerText === 'So'")
    page.click("#new")
    page.wait("!stopper")
    assert page.text(".question") == ""
    talk.steps = said("Well.")
    ask(page, "Who?")
    assert talk.asked[1] == [("user", "Who?")]


def test_missing_key_is_asked_for_and_then_sent(page: Page) -> None:
    """A server with keys must not look broken to somebody who has one."""
    page.js(
        "window.sent = []; window.fetch = async (path, options) => {"
        "  sent.push(options.headers.Authorization ?? '');"
        "  return new Response('{}', {status: 401}); }; 0"
    )
    page.type("Where?")
    page.press("Enter")
    page.wait("!stopper && document.querySelector('.problem')")
    assert "asks for an API key" in page.text(".problem")
    page.click(".problem button")
    assert page.js("document.activeElement.id") == "key"
    page.type("sesame")
    page.press("Enter")
    page.wait("!settings.open && document.activeElement === prompt")
    page.press("Enter")
    page.wait("!stopper && sent.length === 2")
    assert page.js("sent") == ["", "Bearer sesame"]
    assert "does not accept this API key" in page.text(".problem")
    assert page.js("JSON.stringify({...localStorage, ...sessionStorage})") == "{}"


def test_keyboard_alone_is_enough(page: Page, talk: Talk) -> None:
    """Everything has a place in the order of Tab, and shows when it is there."""
    page.type("one")
    page.press("Enter", shift=True)
    page.type("two")
    page.press("Enter")
    page.wait("!stopper && document.querySelector('.answer')")
    assert talk.asked[0] == [("user", "one\ntwo")]
    assert page.js("document.activeElement.id") == "prompt"
    seen = []
    for _ in range(12):
        page.press("Tab")
        where = page.js("document.activeElement.id || document.activeElement.className")
        if where:
            seen.append(where)
            outlined = "getComputedStyle(document.activeElement).outlineStyle"
            ringed = "getComputedStyle(document.getElementById('composer')).boxShadow"
            assert page.js(outlined) != "none" or (where == "prompt" and page.js(ringed) != "none")
    assert {"new", "theme", "open-settings", "tool copy", "tool again", "prompt"} <= set(seen)
    page.js("document.getElementById('open-settings').focus()")
    page.press("Enter")
    page.wait("settings.open")
    close_settings(page)


def test_every_control_has_a_name(page: Page) -> None:
    """A screen reader says `button` for what has none."""

    def controls() -> list[str]:
        roles = {"button", "textbox", "spinbutton", "dialog"}
        tree = page.send("Accessibility.getFullAXTree")["nodes"]
        return [one["name"]["value"] for one in tree if one.get("role", {}).get("value") in roles]

    ask(page, "Where?")
    outside = controls()
    page.click("#open-settings")  # which hides what is outside
    inside = controls()
    assert len(outside) == 7
    assert len(inside) == 11
    assert all(outside)
    assert all(inside)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_follow_the_system_and_the_switch(page: Page, dark: bool) -> None:
    page.look(dark=dark)
    lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] > 128"
    assert page.js(lightness) is not dark
    page.click("#theme")
    assert page.js(lightness) is dark
    page.send("Page.reload")
    page.wait("document.readyState === 'complete' && context")
    assert page.js(lightness) is dark


# Relative luminance and contrast as in WCAG 2.2. Colours are solid, but for transparent ones.
_WEAK_TEXT = """
(() => {
  const light = (c) => c.map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c[3] !== 0) return c;
    }
  };
  const weak = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    const field = e.matches("input, textarea");
    if (!(own || field) || !e.checkVisibility() || e.matches("script, style")) continue;
    for (const pseudo of field ? [null, "::placeholder"] : [null]) {
      const colours = [rgb(getComputedStyle(e, pseudo).color), behind(e)];
      const [a, b] = colours.map((c) => light(c.slice(0, 3)));
      const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (contrast < 4.5) weak.push(`${e.tagName}.${e.className}#${e.id} ${contrast}`);
    }
  }
  return weak;
})()
"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable_in_both_colours(page: Page, talk: Talk, dark: bool) -> None:
    """4.5 to 1 is what level AA asks of text."""
    page.look(dark=dark)
    assert page.js(_WEAK_TEXT) == []
    talk.steps = said("`code`\n```py\nmore\n```\nend", end="length")
    ask(page, "Where?")
    page.js("showProblem(new Problem('No.', 401)); openSettings()")
    assert page.js(_WEAK_TEXT) == []


def test_phone_shows_all_of_it(page: Page, talk: Talk) -> None:
    """At 360 pixels nothing may stick out or be out of a thumb's reach."""
    page.look(**PHONE)
    talk.steps = said("W" * 200 + "\n```\n" + "code " * 40 + "\n```\nend")
    ask(page, "W" * 200)
    fits = "document.documentElement.scrollWidth === 360 && scroller.scrollWidth <= 360"
    assert page.js(fits)
    outside = (
        "[...document.querySelectorAll('button, textarea, input, .question, .answer')]"
        ".filter((e) => e.checkVisibility()).map((e) => [e.id, e.getBoundingClientRect()])"
        ".filter(([, box]) => box.left < 0 || box.right > 360).map(([id]) => id)"
    )
    assert page.js(outside) == []
    page.click("#open-settings")
    assert page.js("settings.scrollWidth <= 360 && settings.getBoundingClientRect().top >= 0")
    assert page.js(outside) == []
