//! Container images in all layouts, made by `python3`.

use std::path::Path;

use offshoot_testkit::run::command;

/// Makes `one` and `two`, layouts of OCI with three layers each of which the first two are the
/// same; `merged-1` to `merged-3` with the first layers of `one`; and `three.tar` as `docker save`
/// writes it, with the first layer and a second one that is also the third of `two`. Prints the
/// chain IDs: those of `one`, and the last ones of `two` and `three.tar`.
const MAKE: &str = r"
import gzip, hashlib, io, json, os, random, sys, tarfile
random.seed(int(sys.argv[1]))
size = int(sys.argv[2])
hexed = lambda data: hashlib.sha256(data).hexdigest()
def layer(*entries):
    out = io.BytesIO()
    tar = tarfile.open(fileobj=out, mode='w', format=tarfile.PAX_FORMAT)
    for name, what in entries:
        info = tarfile.TarInfo(name)
        info.mtime = 1000000000
        kind, data = what[:1], what[1:]
        info.type = {b'f': tarfile.REGTYPE, b'd': tarfile.DIRTYPE, b's': tarfile.SYMTYPE,
                     b'l': tarfile.LNKTYPE}[kind]
        info.mode = 0o755 if kind == b'd' else 0o640
        if kind == b'f':
            info.size = len(data)
            info.pax_headers = {'SCHILY.xattr.user.a': name}
        else:
            info.linkname = data.decode()
        tar.addfile(info, io.BytesIO(data) if kind == b'f' else None)
    tar.close()
    return out.getvalue()
many = [('many/%d/%d' % (n % 7, n), b'f' + random.randbytes(random.randrange(9000)))
        for n in range(size)]
a = layer(('./', b'd'), ('large', b'f' + random.randbytes(8 << 20)), ('etc/', b'd'),
          ('etc/a', b'fa of 1'), ('etc/b', b'fb of 1'), ('opaque/x', b'fx'),
          ('gone/deep/z', b'fz'), ('lib', b'susr/lib'), ('usr/lib/kept', b'fkept'),
          ('early', b'lfile'), ('file', b'ffile'), *many)
b = layer(('etc/.wh.a', b'f'), ('etc/b', b'fb of 2'), ('opaque/new', b'fnew'),
          ('opaque/.wh..wh..opq', b'f'), ('.wh.gone', b'f'), ('lib/', b'd'), ('lib/own', b'fown'),
          ('many/.wh.3', b'f'))
c = layer(('etc/a', b'fa of 3'), ('hard', b'lusr/lib/kept'), ('many/.wh.1', b'f'))
d = layer(('etc/d', b'fd of two'), ('more', b'f' + random.randbytes(300000)))
def layout(name, layers):
    os.makedirs(name + '/blobs/sha256')
    def blob(data):
        open(name + '/blobs/sha256/' + hexed(data), 'wb').write(data)
        return {'digest': 'sha256:' + hexed(data), 'size': len(data)}
    unpacked = ['sha256:' + hexed(data) for data in layers]
    # The same layer is packed in one image and not in the other.
    packs = lambda at: (at + len(name)) % 2
    blobs = [blob(gzip.compress(data, mtime=0) if packs(at) else data)
             for at, data in enumerate(layers)]
    config = blob(json.dumps({'rootfs': {'type': 'layers', 'diff_ids': unpacked}}).encode())
    manifest = blob(json.dumps({'config': config, 'layers': blobs}).encode())
    json.dump({'schemaVersion': 2, 'manifests': [manifest]}, open(name + '/index.json', 'w'))
layout('one', [a, b, c])
layout('two', [a, b, d])
for count in (1, 2, 3):
    layout('merged-%d' % count, [a, b, c][:count])
docker = tarfile.open('three.tar', 'w')
def member(name, data):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    docker.addfile(info, io.BytesIO(data))
# Its configuration names no digests of layers: they are found by reading.
member('config.json', json.dumps({}).encode())
member('a/layer.tar', a)
member('d/layer.tar', d)
member('manifest.json', json.dumps([{'Config': 'config.json', 'RepoTags': ['three:latest'],
                                     'Layers': ['a/layer.tar', 'd/layer.tar']}]).encode())
docker.close()
def chain(layers):
    ids = []
    for data in layers:
        diff = 'sha256:' + hexed(data)
        ids.append(diff if not ids else 'sha256:' + hexed((ids[-1] + ' ' + diff).encode()))
    return ids
print(' '.join(chain([a, b, c]) + chain([a, b, d])[2:] + chain([a, d])[1:]))
";

/// Makes the images in `dir`, with `many` small files in the first layer. Gives the digits of the
/// chain IDs.
pub(crate) fn make_images(dir: &Path, seed: u64, many: u32) -> Vec<String> {
    let words = [seed.to_string(), many.to_string()];
    let made = command("python3").args(["-c", MAKE]).args(words).current_dir(dir).output();
    let made = made.expect("python3 starts");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let ids = String::from_utf8(made.stdout).expect("text");
    ids.split_whitespace().map(|id| id.trim_start_matches("sha256:").to_owned()).collect()
}
