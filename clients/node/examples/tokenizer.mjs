/**
 * The model's own tokenizer and chat template, fetched from the engine, so that a chat needs nothing
 * but an endpoint. Files are cached by their digest, which is verified whenever one is read.
 */
import { createHash, randomUUID } from "node:crypto";
import { mkdir, readFile, rename, writeFile } from "node:fs/promises";
import { homedir } from "node:os";
import { join } from "node:path";
import { Template } from "@huggingface/jinja";
import { Tokenizer as Backend } from "@huggingface/tokenizers";

const CACHE = join(process.env.XDG_CACHE_HOME || join(homedir(), ".cache"), "nanocore", "files");

/** A file of the model as text, from the cache if it is there; undefined if the model has none. */
async function modelFile(engine, name) {
  const entry = engine.welcome.model.files?.find((file) => file.name === name);
  if (!entry) return undefined;
  const path = join(CACHE, entry.sha256);
  const cached = await readFile(path).catch((error) => {
    if (error.code !== "ENOENT") throw error;
  });
  if (cached && createHash("sha256").update(cached).digest("hex") === entry.sha256)
    return cached.toString();
  const content = Buffer.from(await engine.readFile(name));
  await mkdir(CACHE, { recursive: true, mode: 0o700 });
  const unfinished = `${path}.${randomUUID()}`; // renamed when whole: others may read the cache meanwhile
  await writeFile(unfinished, content);
  await rename(unfinished, path);
  return content.toString();
}

/** JSON that may begin with a byte order mark. */
const parse = (text) => JSON.parse(text.replace(/^\uFEFF/, ""));

/** tokenizer_config.json gives a special token as its text, or as an object around it. */
const tokenText = (token) => token?.content ?? token ?? "";

export class Tokenizer {
  #backend;
  #template;
  #config;

  constructor(tokenizer, config, template) {
    this.#backend = new Backend(tokenizer, config);
    this.#config = config;
    this.#template = template === undefined ? undefined : new Template(template);
  }

  /** The tokenizer of an engine's model. */
  static async load(engine) {
    const [tokenizer, config, template] = await Promise.all(
      ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"].map((name) =>
        modelFile(engine, name),
      ),
    );
    if (tokenizer === undefined) throw new Error("this engine's model has no tokenizer.json");
    const parsed = parse(config ?? "{}");
    return new Tokenizer(parse(tokenizer), parsed, template ?? parsed.chat_template);
  }

  encode(text, addSpecialTokens = true) {
    return this.#backend.encode(text, { add_special_tokens: addSpecialTokens }).ids;
  }

  decode(tokenIds) {
    if (tokenIds.length === 0) return "";
    return this.#backend.decode(tokenIds, {
      skip_special_tokens: true,
      clean_up_tokenization_spaces: false,
    });
  }

  /** Token ids of a conversation, ready for the model's answer. */
  encodeChat(messages) {
    if (!this.#template) throw new Error("this engine's model has no chat template");
    const { bos_token, eos_token } = this.#config;
    const text = this.#template.render({
      messages,
      add_generation_prompt: true,
      bos_token: tokenText(bos_token),
      eos_token: tokenText(eos_token),
    });
    return this.encode(text, false);
  }
}
