// The pages of `flow ui` in a real browser: URL RECORDING. URL is the address with its token that `flow ui` printed, over a state
// directory with a run of pipelines/build_manifest_v2.yaml, one manifest on the command line, --transcripts and --model. RECORDING is
// a WAV file, which is also what the microphone hears. What it needs, and pictures: browser.mjs.

import assert from "node:assert/strict";
import { faults, fits, launch, open as openIn, picture, wordsSaid } from "./browser.mjs";

const [url, recording] = process.argv.slice(2);
const { origin } = new URL(url);
const browser = await launch(recording, "--autoplay-policy=no-user-gesture-required");

async function open(options) {
  const page = await openIn(browser, url, { viewport: { width: 1200, height: 850 }, permissions: ["microphone"], ...options });
  assert.ok(!page.url().includes("token"), "the token stays in the address");
  return page;
}

async function look(page, name) {
  await fits(page, name);
  await picture(page, name);
}

for (const [kind, options] of [
  ["light", {}],
  ["dark", { colorScheme: "dark" }],
  ["phone", { viewport: { width: 380, height: 800 } }],
]) {
  const page = await open(options);
  await look(page, `ui-${kind}-1-runs`);
  await page.locator("td a[href^='/runs/']").first().click();
  await page.waitForSelector("svg.dag");
  await look(page, `ui-${kind}-2-run`);
  await page.goto(`${origin}/rows?of=file&file=0`);
  await look(page, `ui-${kind}-3-rows`);

  // By the keyboard alone: search, a row, its sound, its page.
  await page.keyboard.press("/");
  assert.equal(await page.evaluate(() => document.activeElement.matches("[data-search]")), true);
  await page.keyboard.press("Escape");
  await page.keyboard.press("j");
  assert.equal(await page.locator("tr.chosen").count(), 1);
  await page.keyboard.press("Space");
  await page.waitForSelector("tr.chosen button.play:text('■')");
  await page.keyboard.press("Space");
  await page.keyboard.press("Enter");
  await page.waitForURL(/\/row\?/);
  await page.waitForFunction(() => [...document.querySelectorAll(".sound img")].every((image) => image.complete && image.naturalWidth > 0));
  await look(page, `ui-${kind}-4-row`);
  // A form comes back to its row, with what was written.
  const text = page.locator("textarea[name=new_text]");
  if (await text.count()) {
    await text.fill("नया पाठ");
    await page.locator(".correction button").click();
    await page.waitForURL(/\/row\?/);
    assert.equal(await page.locator("textarea[name=new_text]").inputValue(), "नया पाठ");
  }
  for (const [number, path] of ["/tables", "/evaluation", "/training", "/transcripts"].entries()) {
    await page.goto(origin + path);
    await look(page, `ui-${kind}-${5 + number}${path.replace("/", "-")}`);
  }
  await page.locator("a[href^='/transcripts/show']").first().click();
  await page.waitForSelector(".word.unsure");
  assert.equal(await page.locator(".word.other").count() > 0, true);
  await page.locator(".word").nth(1).click();
  await page.waitForSelector(".word.now");
  await look(page, `ui-${kind}-9-transcript`);
  // A recording and the microphone, as on the page of `flow serve`.
  await page.goto(`${origin}/transcripts`);
  await page.waitForSelector("#diarize-choice:not([hidden])");
  await page.setInputFiles("#file", recording);
  await page.waitForSelector(".word");
  await page.locator(".word").nth(1).click();
  await page.waitForSelector(".word.now");
  await look(page, `ui-${kind}-10-recording`);
  if (kind === "light") {
    await page.click("#speak");
    await page.waitForFunction(wordsSaid, 3);
    await page.click("#speak");
    await page.waitForFunction(() => document.querySelector("#status").textContent === "Done.");
    assert.equal(await page.locator("#player").isVisible(), true);
  }
  await page.context().close();
  assert.equal(faults.splice(0).join("\n"), "");
  console.log(`${kind}: as expected`);
}
await browser.close();
