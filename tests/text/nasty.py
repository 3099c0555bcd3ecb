"""Strings that text code gets wrong, written with escapes so that this file stays plain."""

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
ACUTE, STACK = "\u0301", "".join(chr(0x300 + i) for i in range(60))

SPACES = [
    *(" ", "  ", " " * 7, " " * 200, "\t", "\t\t \t", "\n", "\n\n\n", "\r\n", "\r", "\v", "\f"),
    *("\x85", "\xa0", "\u1680", "\u2002\u2003\u2009", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"),
    *(
        " a",
        "a ",
        "  a  ",
        "a\n",
        "\na",
        " \n ",
        "\u200b",
        "a\u200bb",
        "\u2060",
        "\ufeff",
        "\ufeffa",
        "a\ufeff",
    ),
]
CONTROL = [
    *("\0", "a\0b", "\0" * 20, "".join(map(chr, range(32))), "\x7f", "".join(map(chr, range(0x80, 0xA0)))),
    *("\x1b[31mred\x1b[0m", "\b\b\b", "\a", "\u00ad", "\u2061", "\ufff9a\ufffab\ufffb"),
]
MARKS = [
    *(ACUTE, "e" + ACUTE, "\xe9", "e" + ACUTE * 30, "n\u0303o", "\u0344", "a" + STACK + "b" + STACK),
    *(
        "\u1112\u1161\u11ab\u1100\u1173\u11af",
        "\ud55c\uae00",
        "\u0928\u093f",
        "\u0e01\u0e33",
        "\u0f67\u0fb2\u0f8b",
    ),
    *("\u212b \u00c5 A\u030a", "\ufb03 \u2460 \u337f", "\u0130i\u0131I \xdf \u1e9e"),
]
EMOJI = [
    *(
        "\U0001f600",
        "\U0001f600" * 40,
        FAMILY,
        FAMILY * 5,
        "\U0001f1e9\U0001f1ea",
        "\U0001f1e9\U0001f1ea\U0001f1eb",
    ),
    *(
        "\U0001f44d\U0001f3fd",
        "\U0001f3f3\ufe0f\u200d\U0001f308",
        "1\ufe0f\u20e3",
        "\u2764\ufe0f",
        "\u2764\ufe0e",
    ),
    *("\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f", "\u200d", "\ufe0f\ufe0f"),
]
DIRECTION = [
    *(
        "\u05e9\u05dc\u05d5\u05dd abc 123",
        "\u0645\u0631\u062d\u0628\u0627",
        "\u202eabc\u202c",
        "\u2067\u05d0\u2069",
    ),
    *(
        "\u200f\u200e",
        "a\u202eb\u202dc\u202c\u202c",
        "(\u05d0) [\u05d1]",
        "\ufdfd",
        "\u0627\u0644\u0644\u0647",
    ),
]
SCRIPTS = [
    *(
        "\u65e5\u672c\u8a9e\u3068\u304b\u306a",
        "\uff8a\uff9d\uff76\uff78",
        "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
    ),
    *(
        "\u041f\u0440\u0438\u0432\u0435\u0442",
        "\u03ba\u03cc\u03c3\u03bc\u03bf\u03c2",
        "\u10d2\u10d0\u10db",
        "\u0561",
    ),
    *(
        "\u0928\u092e\u0938\u094d\u0924\u0947",
        "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
        "\u1000\u103c\u1031",
        "\u1780",
    ),
    *(
        "\u1208\u121d",
        "\u13a3\u13b3\u13a9",
        "\u14c4\u14c7",
        "\u16a0\u16b1",
        "\ua015",
        "\u2801\u2803",
        "\u07d2",
    ),
    *(
        "\U00010330\U00010331",
        "\U00012000",
        "\U00013000",
        "\U00020000\U0002a6d6",
        "\U0001d504\U0001d4d0",
        "\u4dc0",
    ),
    *("\ue000", "\U000f0000", "\U0010ffff", "\ufdd0", "\ufffe", "\uffff", "\ufffd", "\ufffd" * 30, "a\ufffd"),
]
ESCAPES = [
    *(
        "\\",
        "\\\\",
        "\\n",
        "\\u0000",
        "\\ud83d\\ude00",
        "\\xed\\xa0\\x80",
        "%00%F0%9F",
        "&#0;&amp;amp;",
        "=?utf-8?q?=E9?=",
    ),
    *(
        "\xc3\xa9",
        "\xf0\x9f\x98\x80",
        "\xef\xbf\xbd",
        "<0xE2><0x82><0xAC>",
        "\u2581a\u2581",
        "\u0120a\u010a",
        "##a",
    ),
]
CODE = [
    "def f(x):\n\tif x:\n\t\treturn {'a': [1, *x]}  # \u2713\n",
    "<script>alert('x')</script><!-- <b> --> &lt;",
    "<div style=\"a:'b'\">\r\n  <br/>\r\n</div>",
    "Robert'); DROP TABLE students;--",
    "' OR '1'='1' /* */ UNION SELECT NULL",
    "$(rm -rf /) `x` ${y} && a || b > /dev/null 2>&1",
    '{"a": [null, 1e-9, "\\"\\u00e9"], "b": {}}',
    "{{ 7*7 }} {% raw %} ${7*7} <%= 7 %> #{7}",
    "%s %d %n %1000x {0} {} %%",
    "../../etc/passwd\0.png",
    "C:\\x\\y\\\\z",
    "std::map<int,std::vector<int>>*&&p=nullptr;",
    "\\frac{a}{b} \\\\ $x_{i}^{2}$",
    "https://example.org/a?b=c&d=%20#e",
    "<s> </s> <unk> <pad> [CLS] [SEP] <|endoftext|>",
    "<|im_start|>user\nhi<|im_end|>",
    "<think></think><tool_call>{}</tool_call>",
]
WORDS = [
    *(
        "",
        "a",
        "A",
        "0",
        "-0",
        "00",
        "1234567890" * 9,
        "1,000.00",
        "1e309",
        "NaN",
        "null",
        "undefined",
        "it's don't I'LL",
    ),
    *(
        "a" * 1000,
        "ab" * 300,
        "\u00e9" * 200,
        "x\u0301" * 100,
        "Donaudampfschifffahrtsgesellschaft" * 6,
        "aA" * 50,
    ),
    *(
        "hello.hello ,hello !",
        " ' s n't",
        "...",
        "?!?!",
        "-----",
        "\u2018\u2019\u201c\u201d\u2014\u2026",
        "a\u0000\u0000",
    ),
]

NASTY = [*SPACES, *CONTROL, *MARKS, *EMOJI, *DIRECTION, *SCRIPTS, *ESCAPES, *CODE, *WORDS]
