"""What is recorded of a run holds no secret, and is otherwise as it was."""

from __future__ import annotations

import pytest

from polyturn.tracking.redact import MARK, Redacted, redact

S = "Zx9" + "aB3dE5fG7hJ9" * 4  # 51 letters and digits


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        # tokens that tell what they are
        ("AKIA" + "Q" * 16, "AKIA" + "Q" * 16),
        ("see ASIA" + "7" * 16 + ".", "ASIA" + "7" * 16),
        (f"ghp_{S}", S),
        (f"github_pat_{S}", S),
        (f"glpat-{S[:20]}", S[:20]),
        (f'HfApi("hf_{S[:34]}")', S[:34]),
        (f"sk-proj-{S}", S),
        (f"sk-ant-api03-{S}", S),
        (f"sk_live_{S[:24]}", S[:24]),
        (f"xoxb-123456789012-{S[:24]}", S[:24]),
        (f"AIza{S[:35]}", S[:35]),
        (f"pnu_{S[:36]}", S[:36]),
        (f"npm_{S[:36]}", S[:36]),
        (f"pypi-AgEIcHlwaS5vcmc{S}", S),
        (f"nvapi-{S}", S),
        (f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.{S[:30]}", S[:30]),
        # addresses
        (f"https://b.s3.amazonaws.com/k.png?X-Amz-Date=1&X-Amz-Signature={S}&x=1", S),
        (f"https://b/k?x-amz-security-token={S}%2F%3D", S),
        (f"https://b/k?AWSAccessKeyId=abc&Signature={S}%3D&Expires=1", S),
        (f"https://storage.googleapis.com/k?X-Goog-Signature={S}", S),
        (f"https://a.blob.core.windows.net/c/k?sv=1&sp=r&sig={S}%3D", S),
        (f"https://d.cloudfront.net/k?Policy={S}&Key-Pair-Id=K1", S),
        (f"https://host/k.png?a=1&amp;token={S}", S),
        ("postgresql://mlflow:s3cr3tpass@db:5432/mlflow", "s3cr3tpass"),
        (f"+url = https://x-access-token:{S}@github.com/o/r.git", S),
        (f"https://{S}@github.com/o/r.git", S),
        (f"https://hooks.slack.com/services/T00/B00/{S[:24]}", S[:24]),
        # headers
        (f"Authorization: Bearer {S}", S),
        (f'"Authorization": "Basic {S}=="', S),
        (f"curl -H 'authorization: token {S}'", S),
        # assignments, in code, YAML, JSON, INI and shell
        (f'+    aws_secret_access_key="{S[:40]}",', S[:40]),
        (f"AWS_SECRET_ACCESS_KEY={S[:40]}", S[:40]),
        ("+export WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567", "0123456789abcdef"),
        ("MLFLOW_TRACKING_PASSWORD: correcthorse", "correcthorse"),
        ("ENV HF_TOKEN=lettersonly", "lettersonly"),
        ("  password: hunter2hunter", "hunter2hunter"),
        ('{"api_key": "correct horse battery"}', "correct horse battery"),
        ("client-secret = 'abcdefgh'", "abcdefgh"),
        ('os.environ["OPENAI_API_KEY"] = "letters-only"', "letters-only"),
        ('os.environ.setdefault("MY_TOKEN", "lettersonly")', "lettersonly"),
        (f"AccountKey={S}==;EndpointSuffix=core.windows.net", S),
    ],
)
def test_a_secret_is_taken_out_and_what_is_around_it_stays(text: str, secret: str) -> None:
    for around in (text, f"+{text}\n", f"before\n {text}\nafter"):
        found = redact(around)
        assert secret not in found.text
        assert MARK in found.text
        assert found.count >= 1
    assert redact(f"before\n{text}\nafter").text.splitlines()[::2] == ["before", "after"]


def test_a_private_key_is_taken_out_whole_and_a_diff_keeps_its_lines() -> None:
    body = "\n".join(f"+{S}" for _ in range(5))
    for kind in ("", "RSA ", "OPENSSH ", "ENCRYPTED "):
        text = f"+-----BEGIN {kind}PRIVATE KEY-----\n{body}\n+-----END {kind}PRIVATE KEY-----\n+x = 1\n"
        found = redact(text)
        assert S not in found.text
        assert found.text.count("\n") == text.count("\n")
        assert found.text.endswith("PRIVATE KEY-----\n+x = 1\n")
    assert S not in redact(f"-----BEGIN PRIVATE KEY-----\n{S}\n").text  # a cut one


@pytest.mark.parametrize(
    "text",
    [
        "rollout.max_new_tokens: 144",
        "max_turn_tokens: 24\nnum_tokens = 12345678",
        "token_ids = [1, 2, 3]",
        'aggregation: "token_mean"',
        'ratio_level: Literal["token", "sequence"] = "token"',
        "md5: d41d8cd98f00b204e9800998ecf8427e.dir",
        "commit 9c6a42e9f00b204e9800998ecf8427e9f00b204e",
        "sha256: " + "0a" * 32,
        "torch==2.13.0+cpu",
        "token = tokenizer.eos_token",
        "password = getpass.getpass()",
        'token = os.environ["HF_TOKEN"]',
        "POSTGRES_PASSWORD: ${POSTGRES_PASSWORD}",
        "export HF_TOKEN=$(cat token)",
        "https://host:8080/path?page=2#top",
        "git@github.com:o/r.git",
        'names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")',
        "the key is passed as token=None",
        "skipping-the-first-twenty-or-more-steps",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == Redacted(text, 0)


def test_redacting_twice_changes_nothing_more() -> None:
    once = redact(f'token="{S}" https://u:p4ssword@host/?sig={S} HF_TOKEN=abcdefgh')
    again = redact(once.text)
    assert (once.count, again) == (4, Redacted(once.text, 0))
