"""What can't be combined is refused in one line."""

import pytest
from refusals import refused_with

pytestmark = pytest.mark.usefixtures("two_cores_no_gpu")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("extras=[audit]", "extras.audit.share=0.01 and exact=false .*; exact=true"),
        ("extras=[audit] exact=true strategy=fsdp devices=2 accelerator=cpu", "audit.* and strategy=fsdp .*=ddp"),
        ("extras=[audit] exact=true devices=2 survive=true", r"survive=true and extras=\[audit\] .*no checkpoint has"),
        ("extras.audit.share=1", "extras.audit.share: extras=audit is not chosen: give extras=.audit. too"),
        ("audit=1", "audit: there is no such key; did you mean extras=.audit.?"),
        ("extras=[audit] extras.audit.share=2", "extras.audit.share=2: must be above 0 and at most 1"),
        ("extras=[audit] extras.audit.share=often", "extras.audit.share=often: must be"),
    ],
)
def test_refused_in_one_line(overrides: str, message: str) -> None:
    refused_with(overrides, message)
