"""What secrets look like: assignments, headers, options of commands, URLs, and the tokens of well-known services.

Every pattern is linear: what repeats cannot overlap with what follows it, and whatever begins like a secret is one (an
unclosed quote or key block reaches to the end), so that no start leads to a long search in vain.
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

REDACTED = "[redacted]"
Replacement = str | Callable[[re.Match[str]], str]

NAMES = (
    r"pass(?:word|wd|phrase)|pwd|secret|token|credentials?|api[_-]?key|access[_-]?key(?:[_-]?id)?|"
    r"secret[_-]?(?:access[_-]?)?key|private[_-]?key|account[_-]?key|密码|口令|密钥|令牌"
)
_NAME_HINTS = ("pass", "pwd", "secret", "token", "credential", "key", "密码", "口令", "密钥", "令牌")
_NOT_YET = r"(?!\[redacted\])"
_QUOTED = r'\\+"[^"]*(?:"|\Z)|"(?:[^"\\]|\\.)*(?:"|\\?\Z)|' r"\\+'[^']*(?:'|\Z)|'(?:[^'\\]|\\.)*(?:'|\\?\Z)"
_VALUE = rf"""{_NOT_YET}(?:{_QUOTED}|[^\s"',;&\\]+)"""
# A YAML block scalar: the lines that are indented as its first one is, or further. Also within JSON, where \n stands.
_LINE = r"(?:\r?\n|\\n)"
_BLOCK = (
    rf"[|>][-+0-9]{{0,2}}[ \t]*(?:#[^\n]*)?(?:{_LINE}[ \t]*(?=\r?\n|\\n))*{_LINE}(?P<indent>[ \t]+)(?:(?!\\n)[^\n])*"
    rf"(?:{_LINE}(?:(?P=indent)(?:(?!\\n)[^\n])*|[ \t]*(?=\r?\n|\\n)))*"
)
_KEY_BLOCK = r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_NAMED = rf"""(?:name|key)\\*["']?\s*[:=]\s*\\*["']?[\w.-]{{0,64}}?(?:{NAMES})"""
# What follows an option, or "the password is", when it is spoken of and not used.
_WORDS = (
    r"options?|flags?|arguments?|args?|parameters?|params?|settings?|values?|fields?|is|are|was|and|or|the|a|an|to|for|in|"
    r"on|of|when|while|with|without|from|not|must|should|can|does|has|via|by|instead|file|files"
)
_OF_COMMAND = r"""(?:\\\r?\n|'[^'\n]*'|"[^"\n]*"|[^\n;|&])*"""
_ARGUMENT = rf"""(?!\[redacted\]|-)(?=[!-~])(?:{_QUOTED}|[^\s"'\\]+)"""
_PAIR = r"""(?:"[^":\s]{0,256}:[^"\n]*"?|'[^':\s]{0,256}:[^'\n]*'?|[^\s"':]{1,256}:[^\s"'\\]+)"""
_COOKIES = r"""(?:"[^"=\s]{0,256}=[^"\n]*"?|'[^'=\s]{0,256}=[^'\n]*'?|[^\s"'=]{1,256}=[^\s"'\\]+)"""

# Options that only some commands take a secret by: the command, what else it must have, the option, its secret.
_COMMANDS: tuple[tuple[str, str, str, str], ...] = (
    (r"mysql[a-z]*|mariadb[a-z-]*", r"(?<!\S)(?:-u|--user)", "-p", rf"{_NOT_YET}(?=[!-~])(?:{_QUOTED}|[^\s\"'\\]+)"),
    (r"curl", "", r"-[uU][ \t]*|--(?:proxy-)?user(?:[ \t]+|=)", _PAIR),
    (r"curl", "", r"-b[ \t]*|--cookie(?:[ \t]+|=)", _COOKIES),
    (r"redis-cli", "", r"-a[ \t]+", _ARGUMENT),
    (r"sshpass", "", r"-p[ \t]*", _ARGUMENT),
    (r"mongo[a-z]*", "", r"-p[ \t]+", _ARGUMENT),
    (r"docker|podman|helm", r"(?<!\S)login(?!\S)", r"-p[ \t]+", _ARGUMENT),
    (r"ldap[a-z]+", "", r"-w[ \t]+", _ARGUMENT),
)
_COMMAND_NAMES = "|".join(dict.fromkeys(name for name, *_ in _COMMANDS))
_COMPILED_COMMANDS = [
    (re.compile(rf"(?:{name})\Z", re.I), re.compile(needed), re.compile(rf"(?<!\S)({option})(?:{secret})", re.S))
    for name, needed, option, secret in _COMMANDS
]


def _command(match: re.Match[str]) -> str:
    name, text = match["command"], match[0]
    for names, needed, option in _COMPILED_COMMANDS:
        if names.match(name) and needed.search(text):
            text = option.sub(rf"\g<1>{REDACTED}", text)
    return text


@dataclass(frozen=True, slots=True)
class SecretPattern:
    """One kind of secret.

    Attributes:
        pattern: What is found, the secret and some of what is before it.
        replacement: What takes its place.
        hints: Texts in lower case, one of which must occur for it to match: most texts hold none.
    """

    pattern: re.Pattern[str]
    replacement: Replacement
    hints: tuple[str, ...]

    def replaced(self, text: str, *, lower: str) -> str:
        """``text`` without this kind of secret; ``lower`` is the text in lower case."""
        return self.pattern.sub(self.replacement, text) if any(hint in lower for hint in self.hints) else text


def _kind(pattern: str, *hints: str, new: Replacement = rf"\g<1>{REDACTED}") -> SecretPattern:
    return SecretPattern(re.compile(pattern, re.S), new, hints)


BUILT_IN: tuple[SecretPattern, ...] = (
    _kind(rf"-----BEGIN {_KEY_BLOCK}.*?(?:-----END {_KEY_BLOCK}|\Z)", "private key", new=REDACTED),
    _kind(rf"""(?i)((?:{NAMES})\\*["'`]?\s*:\s*){_BLOCK}""", "|", ">"),
    _kind(
        rf"""(?i)((?<![a-z0-9]){_NAMED}\\*["']?\s*(?:,\s*)?(?:\\n\s*)?\\*["']?value\\*["']?\s*[:=]\s*)(?:{_BLOCK}|{_VALUE})""",
        "value",
    ),
    _kind(
        rf"""(?i)(value\\*["']?\s*[:=]\s*){_NOT_YET}(?:\\*["'][^"'\\]{{0,2000}}\\*["']|[^\s"',;&\\{{}}:=]{{1,2000}})"""
        rf"""(?=\s*(?:,\s*)?(?:\\n\s*)?\\*["']?{_NAMED}(?![\w-]))""",
        "value",
    ),
    _kind(
        r"""(?i)((?:set-)?cookie2?\\*["']?\s*[:=：]\s*\\*["']?)(?=[^\s=;,"']{1,256}=)[^\r\n"'\\]+""",
        "cookie",
    ),
    _kind(r"(?i)((?:JSESSIONID|PHPSESSID|ASP\.NET_SessionId)=)(?!\[redacted\])[^\s\"';&]+", "sess"),
    _kind(
        r"""(?i)(authorization\\*["']?\s*[:=：]\s*\\*["']?)(?:[a-z][a-z0-9-]*[ \t]+)?[^\s"',;\\]+""",
        "authorization",
    ),
    _kind(r"(?i)(?<![a-z0-9])(bearer[ \t]+)(?!auth|token)[a-z0-9._~+/-]{8,}=*", "bearer"),
    _kind(
        rf"""(?i)((?<![\w-])--(?:[a-z0-9]+[-_]){{0,5}}(?:{NAMES}|pass)(?:[ \t]+|[ \t]*\r?\n[ \t]*-[ \t]+))"""
        rf"""(?!-|\[redacted\]|(?:{_WORDS})\b)(?=[!-~])(?:{_QUOTED}|[^\s"',;&|\\]+)""",
        "--",
    ),
    _kind(rf"""(?i)((?:{NAMES})\\*["']\s*,\s*)(?!\\*["'][\w.-]{{1,64}}\\*["']\s*[:=])(?:{_QUOTED})""", *_NAME_HINTS),
    _kind(rf"""(?i)((?:{NAMES})\\*["'`]?\s*(?:[:：]=?|=>?)\s*){_VALUE}""", *_NAME_HINTS),
    # What is said in words: only what can hardly be a word itself.
    _kind(
        rf"""(?i)((?:{NAMES})\s*(?:是|为|就是|改成|改为|设为|设成|设置为)\s*(?:[:：]\s*)?["'“「]?)(?!\[redacted\])"""
        r"""(?:(?=[!#-&(-~]*[0-9!@#$%^&*_+=~-])[!#-&(-~]{3,}|[a-z]{4,}(?=["'”」]?\s*(?:\Z|[，。；！？、,.;!?])))""",
        *_NAME_HINTS,
    ),
    _kind(
        r"(?i)((?<![a-z0-9])(?:password|passwd|passphrase|pwd|secret|token|api[ _-]?key)[ \t]+(?:is|was)\b"
        r"[ \t]*(?::[ \t]*)?"
        r"""["'`]?)(?!\[redacted\]|sha|md5|base|utf|bcrypt|argon|scrypt|pbkdf|v\d|\d+[- ])(?=[^\s"'`]*[a-z])"""
        r"""(?=[^\s"'`]*\d)[^\s"'`,;]{6,}""",
        " is",
        " was",
        "\tis",
    ),
    _kind(
        rf"(?i)(?<![\w.-])(?P<command>{_COMMAND_NAMES})(?=[ \t]){_OF_COMMAND}",
        *("mysql", "mariadb", "curl", "redis-cli", "sshpass", "mongo", "docker", "podman", "helm", "ldap"),
        new=_command,
    ),
    _kind(rf"(?i)(identified\s+by\s+(?:password\s+)?)(?!\[redacted\])(?:{_QUOTED})", "identified"),
    _kind(rf"(?i)((?:with|encrypted)\s+password\s+)(?!\[redacted\])(?:{_QUOTED})", "password"),
    _kind(r"(?i)(login\s+\S{1,128}\s+password\s+)(?!\[redacted\])\S+", "login"),
    _kind(
        r"(?im)((?:^[ \t]*|config[ \t]+set[ \t]+)(?:requirepass|masterauth)[ \t]+[\"']?)(?!\[redacted\])"
        r"(?=[!-~]*[\d!@#$%^&*_+=~-])[!#-&(-~]+(?=[\"']?[ \t]*$)",
        "requirepass",
        "masterauth",
    ),
    _kind(r"(://)(?:[^\s/:?#]*:[^\s/]*|[^\s/?#]*)@", "://", new=rf"\g<1>{REDACTED}@"),
    _kind(
        rf"""(?i)(x-(?:amz|goog)-(?:signature|credential|security-token)\\*["']?\s*[:=]\s*){_VALUE}""",
        "x-amz",
        "x-goog",
    ),
    _kind(r"""(?i)((?:[?&]sig|(?<![a-z])signature)=)(?!\[redacted\])[a-z0-9%+/_=-]{16,}""", "sig"),
    _kind(
        r"\b(?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AROA)[A-Z0-9]{12,}\b",
        *("akia", "asia", "abia", "acca", "agpa", "aida", "aroa"),
        new=REDACTED,
    ),
    _kind(r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*){1,3}", "eyj", new=REDACTED),
    _kind(
        r"(?<![A-Za-z0-9_-])(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|gl(?:pat|ptt|dt|rt|cbt|ft|soat|agent|oas)-[\w-]{16,}|"
        r"xox[abceoprs]-[\w-]{10,}|xapp-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|hf_[A-Za-z0-9]{16,}|npm_[A-Za-z0-9]{16,}|"
        r"pypi-[\w-]{16,}|dckr_pat_[\w-]{16,}|glsa_\w{16,}|do[opr]_v1_[a-f0-9]{16,}|hv[sb]\.[\w-]{16,}|"
        r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{16,}|SG\.[\w-]{10,}\.[\w-]{10,}|[sr]k_(?:live|test)_[A-Za-z0-9]{10,}|"
        r"sk-(?=[\w-]{0,200}\d)[\w-]{16,})",
        *(
            "gh",
            "github_pat_",
            "gl",
            "xox",
            "xapp-",
            "aiza",
            "ya29.",
            "hf_",
            "npm_",
            "pypi-",
            "dckr_pat_",
            "_v1_",
            "hvs.",
            "hvb.",
        ),
        *("shp", "sg.", "k_live_", "k_test_", "sk-"),
        new=REDACTED,
    ),
)
SECRET_KEY = re.compile(rf"(?:{NAMES}|authorization|(?:set-?)?cookies?|x-(?:amz|goog)-signature)\Z", re.I)
# Characters without a width that category Cf does not name.
_INVISIBLE = "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0"


def plain_view(text: str) -> str:
    """``text`` as it looks: wide, narrow and styled letters as plain ones, nothing that has no width.

    Character by character, since composing a long run of accents takes time in its square.
    """
    if text.isascii():
        return text
    table = {ord(char): _looks(char) for char in set(text) if not char.isascii()}
    return text.translate(table)


def _looks(char: str) -> str:
    invisible = unicodedata.category(char) == "Cf" or char in _INVISIBLE or "\ufe00" <= char <= "\ufe0f"
    return "" if invisible else unicodedata.normalize("NFKC", char)
