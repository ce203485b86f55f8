# test_page.py BINARY MODEL PARROT FOLDER: the page in headless Chromium, through chromedriver's WebDriver, with nothing but Python's own
# modules: send, stream, stop, reload, error, tools, thoughts, edit, settings, phone width. Screenshots go to FOLDER.
import base64, json, os, signal, subprocess, sys, time, urllib.request

BINARY, MODEL, PARROT, FOLDER = sys.argv[1:5]
passed = failed = 0

def check(ok, text):
    global passed, failed
    if ok: passed += 1
    else:
        failed += 1
        print('FAIL ' + str(text)[:400])

def start(model, port=0):
    p = subprocess.Popen([BINARY, model, '--port', str(port), '--device', 'cpu', '--threads', '1', '--drain', '0'], stdout=subprocess.PIPE, text=True)
    return p, int(p.stdout.readline().rsplit(':', 1)[1])

class Browser:
    def __init__(self):
        self.driver = subprocess.Popen(['chromedriver', '--port=0'], stdout=subprocess.PIPE, text=True)
        for line in self.driver.stdout:
            if 'started successfully on port' in line:
                self.base = 'http://127.0.0.1:%d' % int(line.rsplit(' ', 1)[1].rstrip('.\n'))
                break
        args = ['--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--window-size=1100,800', '--force-prefers-reduced-motion']
        self.session = None
        self.session = self.call('POST', '', {'capabilities': {'alwaysMatch': {'browserName': 'chrome', 'goog:chromeOptions': {'args': args},
                                              'goog:loggingPrefs': {'browser': 'ALL'}}}})['sessionId']
    def call(self, method, path, body=None):
        url = self.base + '/session' + ('/' + self.session if self.session else '') + path
        data = json.dumps(body if body is not None else {}).encode() if method == 'POST' else None
        request = urllib.request.Request(url, data, {'Content-Type': 'application/json'}, method=method)
        return json.loads(urllib.request.urlopen(request, timeout=90).read())['value']
    def js(self, code, *arguments): return self.call('POST', '/execute/sync', {'script': code, 'args': list(arguments)})
    def find(self, css): return list(self.call('POST', '/element', {'using': 'css selector', 'value': css}).values())[0]
    def click(self, css): self.call('POST', '/element/%s/click' % self.find(css), {})
    def type(self, css, text): self.call('POST', '/element/%s/value' % self.find(css), {'text': text})
    def wait(self, code, what):
        for _ in range(400):
            if self.js('return ' + code): return check(True, what)
            time.sleep(0.05)
        check(False, 'waited for: ' + what)
    def shot(self, name):
        with open(os.path.join(FOLDER, name), 'wb') as f: f.write(base64.b64decode(self.call('GET', '/screenshot')))
    def close(self):
        try: self.call('DELETE', '')
        except OSError: pass
        self.driver.terminate()
        self.driver.wait(20)

IDLE = "document.getElementById('stop').hidden"
ANSWERS = "document.querySelectorAll('article.assistant').length"
LAST = "[...document.querySelectorAll('article.assistant')].pop()"
ENTER, ESCAPE = '\ue007', '\ue00c'

def test_shakespeare(b, server, port):
    b.call('POST', '/url', {'url': 'http://127.0.0.1:%d/' % port})
    b.wait("document.getElementById('model').textContent.includes('shakespeare')", 'the model is named')
    b.js("store.settings = {temperature: 0, max_tokens: 40}; save();")
    b.type('#input', 'Where is <b>Romeo</b>?' + ENTER)
    b.wait(ANSWERS + ' == 1 && ' + IDLE, 'an answer')
    text = b.js('return %s.textContent' % LAST)
    check('tokens/s' in text and len(text) > 40, 'answer and tokens per second: ' + text)
    check(b.js("return document.querySelector('article.user b') === null"), 'what is typed is no HTML')
    b.shot('chat.png')
    b.js("store.settings.max_tokens = 480; store.settings.temperature = 1; save();")
    b.js("window.grew = []; window.timer = setInterval(() => grew.push(document.getElementById('log').textContent.length), 15)")
    b.type('#input', 'Speak long' + ENTER)
    b.wait(ANSWERS + ' == 2 && (' + IDLE + ' || ' + LAST + '.textContent.length > 60)', 'the stream begins')
    b.js("if (!document.getElementById('stop').hidden) document.getElementById('stop').click()")
    b.wait(IDLE, 'it stops')
    check(len(set(b.js('return grew'))) > 2, 'the text grows')
    said = b.js("return document.getElementById('log').innerText")
    b.call('POST', '/refresh')
    b.wait("document.querySelectorAll('article').length == 4", 'the conversation is there after a reload')
    check(b.js("return document.getElementById('log').innerText") == said, 'it is the same')
    # what a model may write: escaped, and formatted
    b.js("""const box = document.createElement('div');
        markdown('# T\\n<img src=x onerror="window.hit=1"> **bold** `a<b` [x](javascript:alert(1)) [y](https://e.org)\\n\\n- one\\n- two\\n\\n```c\\nint x = 1 < 2;\\n```\\n|a|b|\\n|-|-|\\n|1|2|', box);
        window.box = box; document.body.append(box)""")
    check(b.js("return box.querySelector('img') === null && !window.hit && box.querySelectorAll('a').length === 1 && box.querySelector('strong').textContent === 'bold' && "
               "box.querySelector('pre').textContent === 'int x = 1 < 2;' && box.querySelectorAll('li').length === 2 && box.querySelectorAll('td').length === 2"), 'Markdown')
    b.js('box.remove()')
    b.click('article.user button')
    b.js("document.querySelector('textarea.edit').value = 'And Juliet?'; store.settings.max_tokens = 10")
    b.click('article.user .main')
    b.wait(ANSWERS + ' == 1 && ' + IDLE, 'an edited message is answered')
    b.click('article.assistant button[aria-label="Regenerate answer"]')
    b.wait(ANSWERS + ' == 1 && ' + IDLE, 'regenerated')
    b.click('#new')
    b.wait("document.querySelectorAll('#list li').length == 2 && document.querySelectorAll('article').length == 0", 'a second conversation')
    b.click('#settings')
    b.wait("document.getElementById('dialog').open", 'settings')
    b.shot('settings.png')
    b.js("document.getElementById('dialog').close()")
    unnamed = b.js("""return [...document.querySelectorAll('button, input, textarea, select')].filter(e =>
        !(e.getAttribute('aria-label') || e.textContent.trim() || (e.labels && e.labels.length))).map(e => e.outerHTML)""")
    check(unnamed == [], 'controls without a name: %s' % unnamed)
    b.click('#theme')
    b.shot('theme.png')
    b.call('POST', '/window/rect', {'width': 390, 'height': 800})
    wide = b.js('return [innerWidth, ...[...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest("pre, table, .sr")).map(e => e.outerHTML.slice(0, 80))]')
    check(len(wide) == 1, 'phone width: %s' % wide)
    b.click('#menu')
    b.shot('phone.png')
    b.type('body', ESCAPE)
    check(b.js("return getComputedStyle(document.querySelector('aside')).display") == 'none', 'Escape closes the list')
    b.call('POST', '/window/rect', {'width': 1100, 'height': 800})
    server.send_signal(signal.SIGTERM)
    server.wait(60)
    b.type('#input', 'Are you there?' + ENTER)
    b.wait("document.querySelector('.error') && document.querySelector('.error').textContent.includes('cannot be reached')", 'an error is shown')
    b.shot('error.png')

def test_parrot(b, port):
    b.call('POST', '/url', {'url': 'http://127.0.0.1:%d/' % port})
    b.wait("document.getElementById('model').textContent.includes('parrot')", 'the model is named')
    b.js("""store.settings = {tools: '[{"type":"function","function":{"name":"rain","parameters":{"type":"object","properties":{}}}}]'}; save();""")
    b.type('#input', 'Does it rain?' + ENTER)
    b.wait(IDLE + " && document.querySelector('details summary') && document.querySelector('.call pre')", 'a thought and a call')
    check(b.js("return document.querySelector('details .body').textContent") == 'Hm,\nrain?', 'the thought')
    check('Ulm' in b.js("return document.querySelector('.call pre').textContent"), 'the call')
    b.click('details summary')
    b.type('.call label textarea', 'yes')
    b.shot('tools.png')
    b.click('.call .row button')
    b.wait(LAST + ".textContent.includes('It rains.')", 'the answer to the result')

browser = Browser()
servers = [start(MODEL), start(PARROT)]
try:
    test_shakespeare(browser, *servers[0])
    test_parrot(browser, servers[1][1])
    errors = [e for e in browser.call('POST', '/se/log', {'type': 'browser'}) if e['level'] == 'SEVERE' and 'ERR_CONNECTION_REFUSED' not in e['message']]
    check(errors == [], errors)
except Exception as e:
    check(False, repr(e))
finally:
    browser.close()
    for p, _ in servers: p.terminate()
print('page: %d passed, %d failed' % (passed, failed))
sys.exit(failed > 0)
