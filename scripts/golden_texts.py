"""The texts of the goldens, used by scripts/make_goldens.py. Written for this purpose."""

from typing import Any

_ESSAY = (
    "The lighthouse on the northern point had been dark for eleven years when the council voted to light it again. "
    "Nobody remembered who kept the key. The harbour master thought it hung behind the bar of the Anchor; the barman "
    "thought the harbour master had lost it at cards. In the end a locksmith came by bus, opened the door in less than "
    "a minute, and was given soup. Inside, the stairs were sound, the lamp was not, and in the logbook the last entry "
    "said only that the wind had turned. The council bought a new lamp with the money set aside for benches. On the "
    "first night a small crowd stood on the beach with flasks of tea, and when the beam went round for the first time, "
    "slow and very white, an old woman who had said nothing all evening explained to the child next to her that the "
    "light was not there to be looked at. It is there, she said, so that somebody far away, whom we will never meet,"
)

_CODE = '''import heapq


def shortest_path(graph, start, goal):
    """Dijkstra's algorithm. graph maps a node to {neighbour: distance}."""
    queue = [(0, start)]
    best = {start: 0}
    while queue:
        distance, node = heapq.heappop(queue)
        if node == goal:
            return distance
        if distance > best[node]:
            continue
        for neighbour, weight in graph[node].items():
'''

_MEETING = (
    "Summarise the following notes in two sentences.\n\nNotes:\n- The release moves from Tuesday to Thursday because "
    "the installer fails on machines without a network.\n- Priya found that the cache is rebuilt on every start; a fix "
    "is in review and saves about nine seconds.\n- Tomás wants the old configuration format to be read for one more "
    "version. Agreed, with a warning.\n- Support asks for an error message that says which file could not be opened. "
    "Owner: Wen.\n- The benchmark machine is back. Numbers from last week were taken while a backup ran and must not "
    "be used.\n- Next meeting: Monday at ten, in the small room.\n\nSummary:"
)

_STEPS = "".join(f"{i}. {what}\n" for i, what in enumerate((
    "Boil one litre of water in a large pot.",
    "Add two teaspoons of salt.",
    "Put in 250 grams of pasta and stir once.",
    "Meanwhile, warm three spoons of olive oil in a pan.",
    "Slice four cloves of garlic and fry them until they are golden, not brown.",
    "Add a pinch of chilli flakes and half a cup of the cooking water.",
    "Drain the pasta one minute before the time on the packet.",
    "Toss it in the pan over a high heat for one minute.",
), 1))  # fmt: skip


def _chat(user: str) -> str:
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS: tuple[str, ...] = (
    "Hello",
    "A",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Why is the sky blue? Explain in one paragraph.",
    "Question: What is 17 plus 25?\nAnswer:",
    "def fibonacci(n):\n    ",
    "SELECT name, COUNT(*) FROM orders",
    "fn main() {\n    let numbers = vec![1, 2, 3];\n",
    "#include <stdio.h>\n\nint main(void) {\n",
    '{"name": "Ada", "born": 1815, "languages": [',
    "| planet | moons |\n|---|---|\n| Mercury | 0 |\n| Venus | 0 |\n| Earth |",
    "Dear Professor Lindqvist,\n\nthank you for your letter of",
    "Les trois plus grandes villes de France sont",
    "Das Wetter in Hamburg ist heute",
    "El perro de mi vecino ladra cuando",
    "naïve café, façade, coöperate — “quotes” and … dots:",
    "日本の首都は",
    "Привет, меня зовут",
    "🙂 🚀 The emoji above mean",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "   leading spaces and\ttabs\n\n\nand blank lines",
    "to be or not to be to be or not to be to be or",
    "The quick brown fox jumps over the lazy dog. " * 6,
    _ESSAY,
    _CODE,
    _MEETING,
    _STEPS + "9.",
    _chat("What is the boiling point of water?"),
    _chat("Write a haiku about autumn."),
    _chat("List three uses of a paper clip."),
    "<|im_start|>system\nYou answer in French.<|im_end|>\n" + _chat("Where do penguins live?"),
)

TOKENIZER_TEXTS: tuple[str, ...] = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\t\t",
    " \n \n ",
    "a",
    " a",
    "a ",
    "  a  b   c    d",
    "trailing spaces   ",
    "   leading spaces",
    "tab\tbetween\ttabs\t",
    "line\r\nfeed\r\nwindows\r\n",
    "no\u00a0break\u2003em\u200bzero\ufeffbom",
    "Hello world",
    "Hello, world! How's it going? I'll say we've done it, they'd agree; it's 'fine'.",
    "HELLO IT'S I'LL",
    "don’t curly’s",
    "0",
    "1234567890",
    "3.14159 and -2.5e-10",
    "a1b2c3",
    "x  12",
    "x    12  34   y",
    "\n\n7 lines\n 8",
    "year 2024, 1,000,000 people, 50% of them, $9.99",
    "½ ² ٣ Ⅳ ①②③ 四 1½",
    "１２３ full width",
    "naïve façade coöperate Zürich",
    "e\u0301 combining and \u00e9 composed",
    "Ελληνικά и русский",
    "日本語のテキスト、漢字。",
    "中文字符测试",
    "한국어 텍스트",
    "עברית ו-العربية",
    "हिन्दी में पाठ",
    "ภาษาไทย",
    "🙂",
    "🙂🚀🎉 emoji 👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 👍🏽",
    "math: ∑ᵢ xᵢ² ≤ ∞, ∀ε>0 ∃δ",
    "box ┌─┐│└┘ arrows → ← ↑",
    "zalgo ṱ̸̛h̵͝e",
    "𝕳𝖊𝖑𝖑𝖔 𐍈 astral",
    "def f(x):\n    return x ** 2  # square\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; }",
    '<html><body class="x">&amp; &lt;</body></html>',
    "https://example.org/a/b?c=d&e=%20f#g",
    "C:\\Users\\name\\file.txt",
    "user@example.org",
    "snake_case camelCase kebab-case SCREAMING_CASE",
    "!!!???...;;;---===***",
    "((([[[{{{}}}])))",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "antidisestablishmentarianism supercalifragilisticexpialidocious",
    "\u0000\u0001\u001f\u007f control",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "text<|im_end|>more<|endoftext|>",
    "<|im_end|><|im_end|>",
    " <|im_start|> spaces around <|im_end|> ",
    "<|im_start|",
    "< |im_end|> <|IM_END|> <|im_end>",
    "<repo_name>jaxsched<file_sep>a.py\n<gh_stars>5",
    "<jupyter_code>print(1)<jupyter_output>1<empty_output>",
    "<|unknown|> <s> </s> [INST]",
    "mixed 日本 and English, 12 個 and 🙂 done.",
    "The quick brown fox jumps over the lazy dog.\n" * 3,
)

CONVERSATIONS: tuple[tuple[list[dict[str, Any]], bool], ...] = (
    ([{"role": "user", "content": "What is the capital of France?"}], True),
    (
        [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "  Count to 3.\n"},
            {"role": "assistant", "content": "1, 2, 3"},
            {"role": "user", "content": "And back? 🙂"},
        ],
        True,
    ),
    (
        [
            {"role": "user", "content": 'Quote <|im_end|> & "this" <b>tag</b>'},
            {"role": "assistant", "content": "Done."},
        ],
        False,
    ),
)
