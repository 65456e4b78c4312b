//! Damaged sources of builds: what the fuzz target `build_source` runs, on mutations of real ones.

mod bodies;

use std::fs;
use std::process::Command;

use bodies::{FORMS, hostile_source};
use offshoot_testkit::random::{Random, seed_of_run};

/// How many mutations of each source are tried.
const TRIES: u64 = 400;

/// The most memory that the test may take, in KiB: what sources may take together, and the test.
const RESIDENT_KIB_MAX: u64 = 400 << 10;

const MTREE: &str = r"#mtree
/set type=file uid=0 gid=0 mode=0644 nlink=1 flags=none
.               type=dir mode=0755
    hello       size=5 sha256digest=2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824 \
                time=1795820710.783522394 xattr.user.k=dmEgbA==
    a\sb        type=link link=f\040target
    null        type=char device=linux,1,3 optional
    copy        contents=up size=5 nlink=2 inode=7 resdevice=native,8,1
sub             type=dir
    world       cksum=4084889842 nochange
..
..
/unset uid
./sub/more      type=file contents=hello flags=nodump,schg
type=dir mode=0700 ./deep/er
";

const COMPOSEFS: &str = r"/ 4096 40755 4 0 0 0 1695372970.944925700 - - - user.a\x3d=\x00
/inline 5 100644 1 0 0 0 7.0 - a\nb\\\t -
/payload 5 100644 1 0 0 0 7.0 hello - -
/up 5 100644 1 0 0 0 7.0 sub/world - -
/hard 5 @100644 2 0 0 0 7.0 /payload - -
/dir 0 40755 2 0 0 0 7.0 - - -
/dir/link 4 120777 1 0 0 0 7.0 /etc - -
/null 0 20666 1 0 0 259 7.0 - - -
";

/// Archives that other programs make.
const MAKE: &str = r"
import hashlib, io, json, tarfile
def add(tar, name, kind=tarfile.REGTYPE, data=b'', **more):
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, len(data), 0o640
    for key, value in more.items():
        setattr(info, key, value)
    tar.addfile(info, io.BytesIO(data))
def layer(out, **more):
    tar = tarfile.open(fileobj=out, mode='w', **more)
    add(tar, 'dir', tarfile.DIRTYPE)
    add(tar, 'dir/file', data=b'data of a file')
    add(tar, 'up', tarfile.SYMTYPE, linkname='../../../dir')
    add(tar, 'up/through', data=b'through a link')
    add(tar, 'hard', tarfile.LNKTYPE, linkname='dir/later')
    add(tar, 'dir/later', data=b'x' * 700)
    add(tar, 'n' * 150, tarfile.CHRTYPE, devmajor=1, devminor=3)
    add(tar, 'dir/.wh.file', data=b'')
    tar.close()
for name, form in (('gnu', tarfile.GNU_FORMAT), ('pax', tarfile.PAX_FORMAT)):
    with open(name, 'wb') as out:
        layer(out, format=form)
one = io.BytesIO()
layer(one)
blobs = []
def blob(data):
    digest = hashlib.sha256(data).hexdigest()
    blobs.append((digest, data))
    return {'digest': 'sha256:' + digest, 'size': len(data)}
config = json.dumps({'rootfs': {'type': 'layers', 'diff_ids': []}}).encode()
manifest = blob(json.dumps({'config': blob(config), 'layers': [blob(one.getvalue())]}).encode())
with open('oci', 'wb') as out, tarfile.open(fileobj=out, mode='w') as tar:
    for digest, data in blobs:
        add(tar, 'blobs/sha256/' + digest, data=data)
    index = {'schemaVersion': 2, 'manifests': [manifest]}
    add(tar, 'index.json', data=json.dumps(index).encode())
with open('docker', 'wb') as out, tarfile.open(fileobj=out, mode='w') as tar:
    add(tar, 'config.json', data=config)
    add(tar, 'one/layer.tar', data=one.getvalue())
    entry = {'Config': 'config.json', 'RepoTags': None, 'Layers': ['one/layer.tar']}
    add(tar, 'manifest.json', data=json.dumps([entry]).encode())
";

/// Sound sources, each behind the byte that chooses its form.
fn sound_inputs() -> Vec<Vec<u8>> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let made = Command::new("python3").args(["-c", MAKE]).current_dir(dir.path()).status();
    assert!(made.expect("python3 starts").success());
    let read = |name: &str| fs::read(dir.path().join(name)).expect("an archive");
    let choice = |form: &str| {
        let at = FORMS.iter().position(|one| *one == form).expect("a form");
        u8::try_from(at).expect("a small number")
    };
    [
        ("", read("gnu")),
        ("", read("pax")),
        ("mtree:", MTREE.replace("contents=up", "contents=hello").into_bytes()),
        ("composefs:", COMPOSEFS.as_bytes().to_vec()),
        ("oci-archive:", read("oci")),
        ("docker-archive:", read("docker")),
    ]
    .into_iter()
    .map(|(form, bytes)| [&[choice(form)], &bytes[..]].concat())
    .collect()
}

/// Checksums of the headers of an archive, made right.
fn mend_headers(bytes: &mut [u8]) {
    for block in bytes[1..].chunks_exact_mut(512) {
        if &block[257..262] == b"ustar" {
            block[148..156].fill(b' ');
            let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
            block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
    }
}

/// Words that lead parsers, and places that they may not reach.
const WORDS: [&str; 12] = [
    "../secret",
    "/../secret",
    "up",
    "abs",
    "dir/secret",
    "18446744073709551615",
    "0x7fffffffffffffff",
    "\\777",
    "/set ",
    "..\n..\n",
    "\0",
    "@",
];

fn mutated(random: &mut Random, sound: &[u8]) -> Vec<u8> {
    let mut bytes = sound.to_vec();
    let place = |random: &mut Random, len: usize| {
        1 + usize::try_from(random.below(len as u64 - 1)).expect("a place")
    };
    for _ in 0..=random.below(4) {
        let at = place(random, bytes.len());
        match random.below(5) {
            0 => bytes[at] = u8::try_from(random.below(256)).expect("a byte"),
            1 => {
                let word = WORDS[usize::try_from(random.below(12)).expect("a word")].as_bytes();
                let end = bytes.len().min(at + word.len());
                bytes.splice(at..end, word.iter().copied());
            }
            2 => {
                let word = WORDS[usize::try_from(random.below(12)).expect("a word")].as_bytes();
                bytes.splice(at..at, word.iter().copied());
            }
            3 => {
                // A part of it again.
                let end = bytes.len().min(at + 512);
                let part = bytes[at..end].to_vec();
                let to = place(random, bytes.len());
                bytes.splice(to..to, part);
            }
            _ => {
                let end =
                    bytes.len().min(at + 1 + usize::try_from(random.below(40)).expect("small"));
                bytes.drain(at..end);
            }
        }
        if bytes.len() < 2 {
            return sound.to_vec();
        }
    }
    if random.below(2) == 0 {
        mend_headers(&mut bytes);
    }
    bytes
}

#[test]
fn damaged_sources_read_and_write_nothing_outside() {
    let mut random = Random::new(seed_of_run());
    let (mut built, mut refused) = (0, 0);
    for sound in sound_inputs() {
        assert!(hostile_source(&sound), "a sound source: {}", FORMS[usize::from(sound[0])]);
        for _ in 0..TRIES {
            let is_built = hostile_source(&mutated(&mut random, &sound));
            *(if is_built { &mut built } else { &mut refused }) += 1;
        }
    }
    println!("{built} built, {refused} refused");
    assert!(built > refused / 20 && refused > built / 20, "{built} built, {refused} refused");
    let status = fs::read_to_string("/proc/self/status").expect("the state of the process");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().expect("a number");
    assert!(peak < RESIDENT_KIB_MAX, "{peak} KiB");
}
