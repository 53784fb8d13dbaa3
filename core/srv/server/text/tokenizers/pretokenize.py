"""The pre-tokenizers of byte-level BPE, by their names in GGUF files (`tokenizer.ggml.pre`, defined by llama.cpp).

Owns the table of names. Must not know files or vocabularies. Each entry does the same as the original model's
tokenizer.json. Other names are refused, because a wrong split gives wrong ids without any error: those of llama.cpp
whose tokens are not bytes (gemma4, granite-embed-multi-311m, sarvam-moe, whitespace), and afmoe.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN35 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES
SEED_CODER = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + SPACES
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
)
# The cased letters that deepseek-llm's tokenizer.json lists (Latin, Greek, Cyrillic, Cherokee, ...).
DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
SPARK = (
    *DEEPSEEK_V3[:2],
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
JAIS2 = LLAMA3.removesuffix(SPACES) + (
    r"\s*[\r\n]+|" + "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"\s{1}"
)
YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
)
# Letters other than Chinese characters, which are words of their own.
KIMI_UPPER, KIMI_LOWER = (f"[{letters}&&[^\\p{{Han}}]]" for letters in (UPPER[1:-1], LOWER[1:-1]))
KIMI_K2 = (
    r"\p{Han}+|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{KIMI_UPPER}*{KIMI_LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{KIMI_UPPER}+{KIMI_LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
)
WITH_MARKS = (
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}\p{M}])([^a-z]))*((?=[\p{L}\p{M}])([^A-Z]))+" + CONTRACTIONS + "?"
    r"|[^\r\n\p{L}\p{N}]?((?=[\p{L}\p{M}])([^a-z]))+((?=[\p{L}\p{M}])([^A-Z]))*" + CONTRACTIONS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
EXAONE_MOE = CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
CHAMELEON = (
    *("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}"),
    *(r"[\p{P}!-/:-@\[-`{-~]", GPT2),
)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`splits`: regular expressions, each applied to the results of the previous one; matches and gaps become words.

    `nfc`: normalise to Unicode NFC first. `ignore_merges`: a word that is a token is not built from merges. `add_bos`:
    whether to add the BOS token if the file does not say.
    """

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in self.splits]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


def _table() -> dict[str, PreTokenizer]:
    digits = (r"\p{N}", GPT2)
    families = [
        (
            PreTokenizer((GPT2,)),
            "gpt-2 phi-2 jais trillion gigachat a.x-4.0 mellum granite-docling exaone4 modern-bert roberta-bpe "
            "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
        ),
        (PreTokenizer((GPT2,), nfc=True), "mpt olmo"),
        (PreTokenizer(digits), "smollm starcoder refact codeshell minerva-7b exaone mellum2"),
        (PreTokenizer(digits, nfc=True), "command-r"),
        (
            PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True),
            "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        ),
        (PreTokenizer((LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
        (PreTokenizer((LLAMA3,), ignore_merges=True), "glm4 glm5"),
        (PreTokenizer((r"\p{N}{1,3}", LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), ignore_merges=True), "minicpm5"),
        (PreTokenizer((JAIS2,)), "jais-2"),
        (PreTokenizer((QWEN2,), nfc=True), "qwen2 kormo f2llmv2 megrez"),
        (PreTokenizer((QWEN2,)), "deepseek-r1-qwen stablelm2 hunyuan grok-2 solar-open"),
        (PreTokenizer((QWEN2.removeprefix(f"{CONTRACTIONS}|"),)), "ufakzeka"),
        (PreTokenizer(("[^\n]+|[\n]+", QWEN2)), "laguna"),
        (PreTokenizer((QWEN35,), nfc=True), "qwen35"),
        (PreTokenizer((SEED_CODER,)), "seed-coder"),
        (PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
        (PreTokenizer(YOUTU, ignore_merges=True), "youtu"),
        (PreTokenizer((GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
        (PreTokenizer((WITH_MARKS,), ignore_merges=True), "granite-embed-multi-97m"),
        (PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)), "tiny_aya cohere2moe"),
        (PreTokenizer((KIMI_K2,)), "kimi-k2"),
        (PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
        (PreTokenizer((BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
        (PreTokenizer((EXAONE_MOE,)), "exaone-moe"),
        (PreTokenizer(DEEPSEEK_LLM), "deepseek-llm"),
        (PreTokenizer(DEEPSEEK_CODER), "deepseek-coder"),
        (PreTokenizer(DEEPSEEK_V3), "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
        (PreTokenizer(SPARK), "spark2_5"),
        (PreTokenizer((BLOOM,)), "bloom poro-chat gpt3-finnish"),
        (PreTokenizer((BLOOM, r"\p{N}")), "viking"),
        (PreTokenizer(CHAMELEON, add_bos=True), "chameleon"),
        (PreTokenizer(FALCON), "falcon"),
        (PreTokenizer((PUNCTUATION, GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), "default"),
    ]
    return {name: family for family, names in families for name in names.split()}


PRE_TOKENIZERS = _table()
