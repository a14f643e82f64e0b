"""Which calls are the agent's own steps."""

from lightning_rl.proxy.attribution.kinds import Kinds, asks_for_title
from lightning_rl.records import CallKind


def doc(*texts: str, **more: object) -> dict[str, object]:
    roles = ["system", "user", "assistant"]
    return {
        "messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)],
        **more,
    }


def test_named_agents_are_what_the_settings_say() -> None:
    kinds = Kinds({"judge*": CallKind.JUDGE, "*": CallKind.POLICY})
    assert kinds.of("judge-2", None) is CallKind.JUDGE
    assert kinds.of("writer", None) is CallKind.POLICY
    titles = doc("Generate a short title for this conversation.", "hello")
    assert kinds.of("writer", titles) is CallKind.POLICY, "whoever names its agents says what is what"
    assert kinds.of(None, titles) is CallKind.SIDE


def test_requests_for_a_conversation_s_title_are_side_calls() -> None:
    assert asks_for_title(doc("You are a title generator. You output ONLY a thread title.", "fix my code"))
    assert asks_for_title(doc("### Task:\nGenerate a 3-5 word title summarizing the chat history.\n<chat>…"))
    assert asks_for_title(
        doc("Analyze if this starts a new conversation; then extract a 2-3 word title.", "x")
    )


def test_what_only_speaks_of_titles_is_the_agent_s_own_work() -> None:
    for text in (
        "You are a helpful assistant.",
        "Write a title for an article about bees.",
        "You answer questions in a chat session.",
    ):
        assert not asks_for_title(doc(text, "Generate a title for this conversation"))
    titles = "Generate a title for this conversation."
    assert not asks_for_title(doc(titles, "x", tools=[{"type": "function"}]))
    assert not asks_for_title({"messages": [{"role": "system", "content": titles}] * 4})
    for odd in ({}, {"messages": []}, {"messages": ["x"]}, {"messages": [{"content": [1]}]}):
        assert not asks_for_title(odd)
