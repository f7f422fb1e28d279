// The page of `flow serve` in a real browser: ADDRESS RECORDING CONVERSATION. RECORDING is a WAV file, which is also what the
// microphone hears; CONVERSATION has several speakers. What it needs, and pictures: browser.mjs.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { faults, fits, launch, open as openIn, picture, wordsSaid } from "./browser.mjs";

const [address, recording, conversation] = process.argv.slice(2);
const browser = await launch(recording);
const open = (options) => openIn(browser, address, { viewport: { width: 1100, height: 800 }, ...options });

// The contrast (WCAG 2) of what an element writes to what is behind it.
async function contrast(page, selector) {
  return page.locator(selector).first().evaluate((element) => {
    const luminance = (colour) => {
      const [red, green, blue] = colour.match(/[\d.]+/g).map((part) => {
        const value = Number(part) / 255;
        return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
      });
      return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    let behind = element;
    while (behind.parentElement && getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") {
      behind = behind.parentElement;
    }
    const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
}

async function readable(page) {
  for (const selector of ["h1", ".drop label", "#speak", "#status", ".word", ".note", ".head button"]) {
    const found = await contrast(page, selector);
    assert.ok(found >= 4.5, `${selector} has a contrast of ${found.toFixed(2)}`);
  }
}

// A recording: its words come, one that is clicked is played, and the one that is spoken is lit.
{
  const page = await open({});
  await picture(page, "1-empty");
  await page.setInputFiles("#file", recording);
  await page.waitForSelector(".word");
  const words = await page.locator(".word").allTextContents();
  assert.ok(words.length >= 3, words.join(" "));
  const name = recording.split("/").pop();
  assert.equal(await page.locator("#file").evaluate((input) => input.files[0]?.name), name);
  assert.match(await page.locator("#status").textContent(), /^Done in /);
  // A browser shows nothing in a field that it cannot be typed into while it is disabled.
  assert.ok(await page.locator("#file").isEnabled());
  await page.locator(".word").nth(2).click();
  await page.waitForSelector(".word.now");
  const time = await page.locator("#player").evaluate((player) => player.currentTime);
  assert.ok(time > 0, "the player is at the beginning");
  await picture(page, "2-words");
  // By the keyboard: it stops and goes on, wherever no control has the focus.
  const isPaused = (wanted) => page.waitForFunction((wanted) => document.querySelector("#player").paused === wanted, wanted);
  await page.locator("#player").evaluate((player) => {
    player.loop = true;
    return player.play();
  });
  for (const paused of [true, false, true]) {
    await page.keyboard.press("Space");
    await isPaused(paused);
  }
  const [download] = await Promise.all([page.waitForEvent("download"), page.click("#save-srt")]);
  assert.match(readFileSync(await download.path(), "utf8"), /^1\n00:00:0\d,\d{3} --> /);

  // What is no recording is told.
  await page.setInputFiles("#file", { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("no recording") });
  await page.waitForSelector("#error:not([hidden])");
  assert.equal(await page.locator(".word").count(), 0);
  await picture(page, "3-error");
  // So is a server that is gone.
  await page.context().setOffline(true);
  await page.setInputFiles("#file", recording);
  await page.waitForSelector("#error:text('cannot be reached')");
  await page.context().setOffline(false);
  // The browser itself prints that the server answered 400, and that it was not there.
  assert.equal(faults.splice(0).filter((fault) => !/400|ERR_INTERNET_DISCONNECTED/.test(fault)).join("\n"), "");
  await page.context().close();
}
console.log("recording: as expected");

// Speakers; a phone; the dark scheme. By the keyboard alone where that can be.
for (const [name, options] of [
  ["4-phone", { viewport: { width: 360, height: 740 }, isMobile: true, hasTouch: true }],
  ["5-dark", { colorScheme: "dark" }],
]) {
  const page = await open(options);
  await page.waitForSelector("#diarize-choice:not([hidden])");
  await page.focus("#diarize");
  await page.keyboard.press("Space");
  await page.setInputFiles("#file", conversation);
  await page.waitForSelector(".segment .speaker");
  const speakers = new Set(await page.locator(".segment .speaker").allTextContents());
  assert.ok(speakers.size >= 2, [...speakers].join(", "));
  await fits(page, name);
  await readable(page);
  await picture(page, name);
  await page.context().close();
}
console.log("speakers, phone and dark: as expected");

// The microphone: words come while it listens, and stay after "Stop"; with their speakers, where that is asked.
for (const diarize of [false, true]) {
  const page = await open({ permissions: ["microphone"] });
  await page.waitForSelector("#diarize-choice:not([hidden])");
  await page.setChecked("#diarize", diarize);
  await page.focus("#speak");
  await page.keyboard.press("Enter");
  await page.waitForSelector("#transcript .segment p:has-text(' ')");
  const said = await page.locator("#speak").textContent();
  assert.equal(said, "Stop");
  await page.waitForFunction(wordsSaid, 3);
  await picture(page, diarize ? "8-live-speakers" : "6-live");
  await page.click("#speak");
  await page.waitForFunction(() => document.querySelector("#status").textContent === "Done.");
  const words = await page.locator(".word").allTextContents();
  assert.ok(words.length >= 3, words.join(" "));
  assert.ok(await page.locator("#error").isHidden(), await page.locator("#error").textContent());
  const speakers = await page.locator(".segment .speaker").count();
  assert.equal(speakers > 0, diarize, `${speakers} segments with speakers`);
  assert.equal(await page.locator(".partial").count(), 0);
  const coloured = await page.locator(".segment[class*=speaker-] .speaker").allTextContents();
  assert.ok(!coloured.includes("UNKNOWN"), coloured.join(", "));
  // What was said plays along.
  await page.locator(".word").nth(1).click();
  await page.waitForSelector(".word.now");
  assert.ok((await page.locator("#player").evaluate((player) => player.duration)) > 1);
  await picture(page, diarize ? "9-live-speakers-done" : "7-live-done");
  console.log(`live: ${words.join(" ")}`);
  await page.context().close();
}

// A job: it is listed, done, shown with its recording, and removed.
{
  const page = await open({});
  await page.locator("#as-job").check();
  await page.setInputFiles("#file", recording);
  await page.locator("#job-list button", { hasText: "Show" }).click();
  await page.waitForSelector(".word");
  assert.ok(await page.locator("#player").isVisible());
  await picture(page, "job");
  await page.locator("#job-list button", { hasText: "Remove" }).click();
  await page.locator("#jobs").waitFor({ state: "hidden" });
  await page.context().close();
}

assert.equal(faults.join("\n"), "");
await browser.close();
console.log("page: as expected");
