"""Secrets stay out, what is none stays in, and no input takes long."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_pipeline.errors import ConfigurationError
from rag_pipeline.invocations.redaction import Redactor
from rag_pipeline.invocations.secret_patterns import REDACTED

KEY_BLOCK = "-----BEGIN RSA PRIVATE KEY-----\nMIIEhunter2\n+/=\n-----END RSA PRIVATE KEY-----"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJodW50ZXIyIn0.c2lnbmF0dXJl-hunter2"

# A text, and what is left of it.
SECRETS = {
    "Authorization: Bearer hunter2hunter2": "Authorization: [redacted]",
    "authorization: hunter2": "authorization: [redacted]",
    'curl -H "Authorization: Basic aHVudGVyMg==" http://h': 'curl -H "Authorization: [redacted]" http://h',
    "Authorization: Token hunter2, please": "Authorization: [redacted], please",
    "use bearer hunter2.hunter2_x-y/z+1== now": "use bearer [redacted] now",
    "password=hunter2": "password=[redacted]",
    "password = 'hunter2 with blanks' next": "password = [redacted] next",
    "DB_PASSWORD=hunter2&user=me": "DB_PASSWORD=[redacted]&user=me",
    "passwd: hunter2;": "passwd: [redacted];",
    "mysql --password=hunter2 -u root": "mysql --password=[redacted] -u root",
    "pwd=hunter2": "pwd=[redacted]",
    "client_secret=hunter2": "client_secret=[redacted]",
    "api_key=hunter2": "api_key=[redacted]",
    "API-KEY: hunter2": "API-KEY: [redacted]",
    "apikey => hunter2": "apikey => [redacted]",
    "access_token:hunter2": "access_token:[redacted]",
    "token=hunter2": "token=[redacted]",
    "aws_secret_access_key = hunter2/hunter2+hunter2": "aws_secret_access_key = [redacted]",
    "aws_access_key_id=hunter2": "aws_access_key_id=[redacted]",
    "密码：hunter2": "密码：[redacted]",
    "数据库密码=hunter2，请保密": "数据库密码=[redacted]",
    '{"password": "hunter2", "user": "me"}': '{"password": [redacted], "user": "me"}',
    '{"password": "hunter2 \\" hunter2"}': '{"password": [redacted]}',
    r"{\"password\": \"hunter2\", \"user\": \"me\"}": r"{\"password\": [redacted], \"user\": \"me\"}",
    "{'secret': 'hunter2'}": "{'secret': [redacted]}",
    'password: "hunter2 without an end': "password: [redacted]",
    "password: 'hunter2 \\": "password: [redacted]",
    "AKIAIOSFODNN7EXAMPLE in the log": "[redacted] in the log",
    f"before\n{KEY_BLOCK}\nafter": "before\n[redacted]\nafter",
    "-----BEGIN PRIVATE KEY-----\nhunter2, cut off": "[redacted]",
    "postgresql://me:hunter2@db/x": "postgresql://[redacted]@db/x",
    "redis://:hunter2@cache:6379": "redis://[redacted]@cache:6379",
    "https://me:hunter2@hunter2@host/p?q=a@b": "https://[redacted]@host/p?q=a@b",
    "https://hunter2@host/path": "https://[redacted]@host/path",
    f"cookie {JWT};": "cookie [redacted];",
    "ghp_hunter2hunter2hunter2hunter2hunter2": "[redacted]",
    "xoxb-hunter2-hunter2": "[redacted]",
    "sk-hunter2hunter2hunter2": "[redacted]",
    "tool --password hunter2 -v": "tool --password [redacted] -v",
    "tool --db-password 'hunter2 x' -v": "tool --db-password [redacted] -v",
    "tool --token hunter2": "tool --token [redacted]",
    "tool --token=hunter2": "tool --token=[redacted]",
    "args:\n- --api-key\n- hunter2\n- -v": "args:\n- --api-key\n- [redacted]\n- -v",
    '["--password", "hunter2", "-v"]': '["--password", [redacted], "-v"]',
    "mysql -h db -u root -phunter2 shop": "mysql -h db -u root -p[redacted] shop",
    "mysqldump -uroot -p'hunter2;x' shop | gzip": "mysqldump -uroot -p[redacted] shop | gzip",
    "mariadb-dump --user=root -phunter2": "mariadb-dump --user=root -p[redacted]",
    "mysql \\\n -u root \\\n -phunter2": "mysql \\\n -u root \\\n -p[redacted]",
    "curl -u me:hunter2 http://h": "curl -u [redacted] http://h",
    'curl -s --user "me:hunter2 x" http://h': "curl -s --user [redacted] http://h",
    "curl --proxy-user=me:hunter2 http://h": "curl --proxy-user=[redacted] http://h",
    "curl -b sid=hunter2 http://h": "curl -b [redacted] http://h",
    "redis-cli -h c -a hunter2 INFO": "redis-cli -h c -a [redacted] INFO",
    "sshpass -p hunter2 ssh h": "sshpass -p [redacted] ssh h",
    "docker login -u me -p hunter2 hub": "docker login -u me -p [redacted] hub",
    "Cookie: sid=hunter2; x=hunter2": "Cookie: [redacted]",
    "set-cookie: sid=hunter2; Path=/\nNext: 1": "set-cookie: [redacted]\nNext: 1",
    'curl -H "Cookie: sid=hunter2" http://h': 'curl -H "Cookie: [redacted]" http://h',
    "JSESSIONID=hunter2; x": "JSESSIONID=[redacted]; x",
    "http://h/o?X-Amz-Signature=hunter2&x=1": "http://h/o?X-Amz-Signature=[redacted]&x=1",
    "http://h/o?X-Amz-Credential=hunter2%2Fs3&x=1": "http://h/o?X-Amz-Credential=[redacted]&x=1",
    "http://h/o?sv=1&sig=hunter2hunter2%3D&x=1": "http://h/o?sv=1&sig=[redacted]&x=1",
    "hf_hunter2hunter2hunter2": "[redacted]",
    "gho_hunter2hunter2hunter2": "[redacted]",
    "github_pat_hunter2hunter2hunter2_hunter2": "[redacted]",
    "glpat-hunter2hunter2-hunter2": "[redacted]",
    "xoxp-hunter2-hunter2": "[redacted]",
    "npm_hunter2hunter2hunter2": "[redacted]",
    '{"name":"DB_PASSWORD","value":"hunter2"}': '{"name":"DB_PASSWORD","value":[redacted]}',
    r"{\"name\": \"DB_PASSWORD\", \"value\": \"hunter2\"}": r"{\"name\": \"DB_PASSWORD\", \"value\": [redacted]}",
    '{"value": "hunter2", "name": "DB_PASSWORD"}': '{"value": [redacted], "name": "DB_PASSWORD"}',
    "- name: API_TOKEN\n  value: hunter2\n- name: X": "- name: API_TOKEN\n  value: [redacted]\n- name: X",
    "SECRET_KEY: |\n  hunter2\n   hunter2\n\n  hunter2\nnext: 1": "SECRET_KEY: [redacted]\nnext: 1",
    "data:\n  token: >-\n    hunter2\n  user: me": "data:\n  token: [redacted]\n  user: me",
    r"SECRET_KEY: |\n  hunter2\n  hunter2\nnext: 1": r"SECRET_KEY: [redacted]\nnext: 1",
    '"password" , "hunter2" x': '"password" , [redacted] x',
    "password＝hunter2": "password=[redacted]",
    "ｐａｓｓｗｏｒｄ: hunter2 好": "password: [redacted] 好",
    "pass\u200bword: hunter2": "password: [redacted]",
    "pass\u00adword\u2060=\ufeffhunter2": "password=[redacted]",
    "𝐩𝐚𝐬𝐬𝐰𝐨𝐫𝐝=hunter2": "password=[redacted]",
    "密码是 hunter2": "密码是 [redacted]",
    "root 密码为hunter2，别外传": "root 密码为[redacted]，别外传",
    "口令: hunter2": "口令: [redacted]",
    "the password is hunter2!": "the password is [redacted]",
    "CREATE USER a IDENTIFIED BY 'hunter2'": "CREATE USER a IDENTIFIED BY [redacted]",
    "ALTER ROLE a WITH PASSWORD 'hunter2'": "ALTER ROLE a WITH PASSWORD [redacted]",
    "machine h login me password hunter2": "machine h login me password [redacted]",
    "requirepass hunter2\nport 1": "requirepass [redacted]\nport 1",
    "CONFIG SET requirepass hunter2": "CONFIG SET requirepass [redacted]",
}
HARMLESS = [
    "Redis 连接数打满，怎么排查？",
    "how many tokens does the context pack hold? tokens: 300",
    "Kubernetes secrets are mounted as files",
    "the keyword: redis, the primary key: id",
    "rotate the password before Friday",
    "mail a@b.example about http://host:8080/path?x=1",
    "bearer authentication fails",
    "at 12:30 the key was evicted",
    "task-skill-risk-analysis-of-everything",
    "eyJ is how a JWT begins",
    "password reset runbook",
    "token bucket rate limit",
    "secret rotation procedure",
    "Redis requirepass 怎么配置",
    "requirepass configuration",
    "密码过期怎么办",
    "密码是什么时候改的",
    "口令为空时怎么登录",
    "密码是 Redis 的配置项",
    "令牌桶限流怎么调",
    "the --password option is deprecated",
    "--password 怎么用",
    "docker login --password-stdin fails",
    "password is required for sudo",
    "token is expired, token is base64-encoded",
    "mysql -u root -p 连不上",
    "mysql -h db -P3306 -u root",
    "docker run -p 3306:3306 mysql",
    "mysql 主从延迟，-p 端口 3307",
    "curl -u 参数怎么写",
    "kubectl get secret -n prod",
    "Cookie: how to clear it",
    "session cookie too large",
    "passwd file permissions",
    "name: token-bucket, value: 100",
    "sk-learn-compatible-estimators",
    "ＡＰＩ 超时，Ｒｅｄｉｓ 连接数＝１００",
    "redis-cli -h cache -p 6379 INFO",
    "certificate signature algorithm",
    "family 👨\u200d👩\u200d👧 of tokens",
]


@pytest.mark.parametrize(("text", "left"), SECRETS.items(), ids=lambda text: text[:30])
def test_a_secret_is_replaced_and_the_rest_stays(text: str, left: str) -> None:
    assert Redactor().text(text) == left


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor().text(text) == text


@pytest.mark.parametrize("text", SECRETS, ids=lambda text: text[:30])
def test_a_secret_is_found_at_any_depth_and_in_keys(text: str) -> None:
    cleaned = json.dumps(Redactor().value({"a": [{"b": (text,)}], text: 1}))
    assert "hunter2" not in cleaned
    assert "AKIA" not in cleaned


@pytest.mark.parametrize(
    "key",
    [
        "password",
        "db_password",
        "dbPassword",
        "X-Api-Key",
        "apiKey",
        "access_token",
        "Authorization",
        "client-secret",
        "密码",
    ],
)
def test_the_whole_value_of_a_key_that_names_a_secret_is_replaced(key: str) -> None:
    assert Redactor().value({key: "x", "user": "me"}) == {key: REDACTED, "user": "me"}
    assert Redactor().value({key: {"of": ["x"]}}) == {key: REDACTED}
    assert Redactor().value({key: 1234}) == {key: REDACTED}
    assert Redactor().value({key: ""}) == {key: ""}
    assert Redactor().value([{"name": key, "value": "x"}]) == [{"name": key, "value": REDACTED}]


@pytest.mark.parametrize(
    "key", ["tokens", "max_tokens", "keyword", "matched_keywords", "token_count", "secretary", "key"]
)
def test_a_key_that_only_looks_alike_keeps_its_value(key: str) -> None:
    assert Redactor().value({key: 300}) == {key: 300}


def test_configured_patterns_are_redacted_in_keys_and_values() -> None:
    redactor = Redactor([r"EMP-\d+", "内部.{2}"])
    assert redactor.text("ask EMP-4711 about 内部代号") == "ask [redacted] about [redacted]"
    assert redactor.value({"EMP-1": ["EMP-2", 3]}) == {"[redacted]": ["[redacted]", 3]}


def test_a_pattern_that_is_none_is_refused_with_its_text() -> None:
    with pytest.raises(ConfigurationError, match=r"invocations.redact: '\(unclosed' is no regular expression"):
        Redactor(["(unclosed"])


def test_a_session_id_stays_itself_unless_it_cannot_be_stored() -> None:
    redactor = Redactor(["EMP-\\d+"])
    assert redactor.session_id(" incident-4711\n") == "incident-4711"
    assert redactor.session_id("  ") == ""
    for odd in ("x" * 256, "a\x00b", "a\ud800", "token=hunter2", "EMP-1"):
        assert redactor.session_id(odd).startswith("sha256:")
    assert redactor.session_id("EMP-1") != redactor.session_id("EMP-2")


@given(
    st.text(
        alphabet=st.sampled_from("password=:\"'\\ \n[]redactoknhi{},;&/@-BEGINPRVATK密码是：＝ｐ\u200beyJ._|>u1"),
        max_size=80,
    )
)
def test_redacting_twice_changes_nothing_more_and_never_fails(text: str) -> None:
    redactor = Redactor()
    once = redactor.text(text)
    assert redactor.text(once) == once


REPEATED = {
    "names": "password=",
    "names and blanks": "password" + " " * 50,
    "open quotes": 'password="',
    "escaped quotes": "token=\\'",
    "mixed quotes": "secret='\"\\",
    "beginnings of a JWT": "eyJ",
    "parts of a JWT": "eyJaaaaa.",
    "schemes": "://",
    "users": "://a:b",
    "beginnings of a key": "-----BEGIN ",
    "keys without an end": "-----BEGIN PRIVATE KEY-----",
    "bearers": "bearer ",
    "headers": "authorization: ",
    "prefixes": "sk-ghp_AKIA",
    "backslashes": "\\",
    "letters": "a",
    "alternating names": "secret_secret-access_access_key",
    "options": "--password ",
    "long options": "--a-a-a-",
    "commands": "mysql -u -p",
    "quotes of commands": "curl -u '\"",
    "pairs": 'curl -u "a:',
    "cookies": "cookie: a",
    "blocks": "password: |\n",
    "blank blocks": "password: |\n  \n",
    "block lines": "token: |\n  a\n",
    "escaped blocks": "token: |\\n  ",
    "names and values": '"name":"password","value":',
    "values": "value=",
    "quoted values": 'value="a',
    "blanks of values": "value: name: password" + " " * 60,
    "said": "password is ",
    "said blanks": "password is" + " " * 60,
    "said in Chinese": "密码是：",
    "lists": '"password","',
    "signatures": "&sig=",
    "wide": "ｐａｓｓｗｏｒｄ＝",
    "accents": "\u0315\u0300",
    "invisible": "p\u200b",
    "requirepass": "requirepass 1 ",
    "logins": "login a password ",
}


@pytest.mark.parametrize("part", REPEATED.values(), ids=REPEATED)
def test_the_time_is_linear_in_the_length(part: str) -> None:
    """Four times the text takes about four times as long, where backtracking would take sixteen times and more."""
    redactor = Redactor()

    def best_of_three(length: int) -> float:
        text = "password://eyJ" + part * (length // len(part))
        times = []
        for _ in range(3):
            begin = time.process_time()
            redactor.text(text)
            times.append(time.process_time() - begin)
        return min(times)

    short, long = best_of_three(100_000), best_of_three(400_000)
    assert long < 9 * short + 0.02
