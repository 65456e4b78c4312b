//! The real tool and ours make volumes with the same options, and these say the same of themselves.
//!
//! Trees and chunks of a new volume lie elsewhere, and so do generations and random numbers differ;
//! all else in the superblock is the same.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use offshoot_testkit::btrfs::disks::{AttachedImages, assert_image_checks};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::{command, run};

use super::Bench;

const UUID: &str = "0f3c92a4-7a0e-4d5e-9c1b-2d6e8f1a3b5c";

/// How many devices, and the options.
const VOLUMES: [(usize, &str); 26] = [
    (1, ""),
    (1, "-L name -U 0f3c92a4-7a0e-4d5e-9c1b-2d6e8f1a3b5c"),
    (
        1,
        "--uuid 0f3c92a4-7a0e-4d5e-9c1b-2d6e8f1a3b5c --device-uuid 0f3c92a4-7a0e-4d5e-9c1b-2d6e8f1a3b5c",
    ),
    (1, "-m single"),
    (1, "-d dup"),
    (1, "-d DUP --metadata=single"),
    (1, "-d raid0"),
    (1, "--mixed"),
    (1, "-M -m dup -d dup"),
    (1, "-n 4k"),
    (1, "--nodesize 64K"),
    (1, "-s 4096"),
    (1, "-s 8k"),
    (1, "--csum xxhash"),
    (1, "--checksum sha256"),
    (1, "--csum blake2"),
    (1, "-O ^no-holes"),
    (1, "-O ^extref,^skinny-metadata"),
    (1, "-O block-group-tree"),
    (1, "-O ^no-holes -R free-space-tree"),
    (1, "-b 200m"),
    (1, "-K -v --byte-count 200M"),
    (2, ""),
    (2, "-d raid0 -m raid1 -L several"),
    (3, "-d single -m raid1c3"),
    (4, "-d raid10 -m raid1c4"),
];

/// The fields of a superblock that do not depend on chance and on where things lie.
const FIELDS: [&str; 19] = [
    "csum_type",
    "csum_size",
    "bytenr",
    "flags",
    "magic",
    "metadata_uuid",
    "label",
    "log_root",
    "total_bytes",
    "sectorsize",
    "nodesize",
    "root_dir",
    "num_devices",
    "compat_flags",
    "compat_ro_flags",
    "incompat_flags",
    "dev_item.total_bytes",
    "dev_item.type",
    "dev_item.devid",
];

/// Fields that are the same if the options give ids.
const IDS: [&str; 2] = ["fsid", "dev_item.uuid"];

fn superblock(image: &Path) -> BTreeMap<String, String> {
    let args = ["inspect-internal".as_ref(), "dump-super".as_ref(), image.as_os_str()];
    let text = run("btrfs", &args);
    let pair = |line: &str| {
        let (name, value) = line.split_once(char::is_whitespace)?;
        Some((name.to_owned(), value.trim().to_owned()))
    };
    text.lines().filter_map(pair).collect()
}

/// What a summary says: names, and the values that do not depend on chance. The sizes of the first
/// block groups are each tool's own.
fn summary(text: &str) -> Vec<(String, String)> {
    let line = |line: &str| {
        let (name, value) = line.split_once(':').filter(|(name, _)| *name != "NOTE")?;
        let value = value.trim();
        let value = match name.trim() {
            "UUID" => "",
            "Data" | "Metadata" | "System" | "Data+Metadata" => value.split(' ').next()?,
            _ => value,
        };
        Some((name.to_owned(), value.to_owned()))
    };
    // What comes before is about defaults that changed in old versions.
    let begin = text.find("Label:").unwrap_or(0);
    let mut lines: Vec<_> = text[begin..].lines().filter_map(line).collect();
    lines.sort();
    lines
}

#[test]
fn volumes_say_the_same_of_themselves() {
    let Some(_judges) = judges::require() else { return };
    for (devices, options) in VOLUMES {
        let bench = Bench::new();
        let names = |tool: &str| {
            let names = (0..devices).map(|number| format!("{tool}{number}.img"));
            names.collect::<Vec<_>>()
        };
        for name in ["real", "ours"].into_iter().flat_map(names) {
            bench.image(&name, 300);
        }
        let real = command("mkfs.btrfs")
            .args(options.split_whitespace())
            .args(names("real"))
            .current_dir(bench.dir.path())
            .output()
            .expect("mkfs.btrfs starts");
        assert!(real.status.success(), "{options}");
        let ours = bench.run(&bench.link(), &format!("{options} {}", names("ours").join(" ")));
        assert!(ours.status.success(), "{options}: {}", String::from_utf8_lossy(&ours.stderr));
        let said = String::from_utf8_lossy(&ours.stdout);
        let real_said = String::from_utf8_lossy(&real.stdout);
        assert_eq!(summary(&said), summary(&real_said), "{options}: {said}\n{real_said}");
        assert!(said.contains("Devices:\n   ID        SIZE  PATH"), "{said}");
        let (ours, real) = (bench.path("ours0.img"), bench.path("real0.img"));
        let (our_fields, real_fields) = (superblock(&ours), superblock(&real));
        let ids = if options.contains(UUID) { &IDS[..] } else { &[] };
        let ids = ids.iter().filter(|name| **name == "fsid" || options.contains("device-uuid"));
        for &field in FIELDS.iter().chain(ids) {
            let (ours, real) = (our_fields.get(field), real_fields.get(field));
            assert!(real.is_some(), "{options}: {field}");
            assert_eq!(ours, real, "{options}: {field}");
        }
        if devices == 1 && !options.contains("-s 8k") {
            assert_image_checks(&ours);
        }
    }
}

/// Both refuse these with the same exit code, and change nothing.
#[test]
fn both_refuse_the_same() {
    let Some(_judges) = judges::require() else { return };
    let bench = Bench::new();
    std::fs::create_dir_all(bench.path("top/d")).expect("a directory");
    std::fs::write(bench.path("top/f"), "f").expect("a file");
    bench.image("v.img", 300);
    bench.does("-q -L first v.img");
    bench.occupied("w.img", 300);
    bench.occupied("small.img", 8);
    let images = ["v.img", "w.img", "small.img"];
    let bytes_of = |name: &str| fs::read(bench.path(name)).expect("an image");
    let before = images.map(bytes_of);
    // The real tool has images of its own.
    let other = Bench::new();
    std::fs::create_dir_all(other.path("top/d")).expect("a directory");
    std::fs::write(other.path("top/f"), "f").expect("a file");
    for line in [
        "",
        "v.img",
        "-q v.img",
        "missing.img",
        "small.img",
        "--bogus w.img",
        "-Z w.img",
        "-l 16k w.img",
        "-A 0 w.img",
        "-d",
        "-d bogus w.img",
        "-m raid1 w.img",
        "-d raid10 w.img",
        "--csum bogus w.img",
        "-n 12345 w.img",
        "-n 128k w.img",
        "-n 2k w.img",
        "-s 12345 w.img",
        "-s 8192 -n 4096 w.img",
        "-M -n 16k w.img",
        "-M -d dup w.img",
        "-O bogus w.img",
        "-O ^no-holes,bgt w.img",
        "-U nonsense w.img",
        "-b 1x w.img",
        "-b 300MiB w.img",
        "-b 1G w.img",
        "w.img w.img",
        "--rootdir nowhere w.img",
        "--rootdir top v.img",
        "--rootdir top w.img small.img",
        "--subvol d w.img",
        "--shrink w.img",
        "--compress zstd w.img",
        "--rootdir top --subvol nowhere w.img",
        "--rootdir top --subvol f w.img",
        "--rootdir top --subvol default:d --subvol default:d w.img",
        "--rootdir top --compress bogus w.img",
        "--rootdir top --compress lzo:3 w.img",
        "--rootdir top --compress zstd:16 w.img",
    ] {
        for name in images {
            fs::copy(bench.path(name), other.path(name)).expect("a copy");
        }
        // What is refused is refused for its own sake, and not for what the image holds.
        let force = if line.contains("w.img") || line == "small.img" { "-f" } else { "-q" };
        let real = command("mkfs.btrfs")
            .arg(force)
            .args(line.split_whitespace())
            .current_dir(other.dir.path())
            .output()
            .expect("mkfs.btrfs starts");
        assert_eq!(real.status.code(), Some(1), "the real one: {line}");
        bench.fails(&format!("{force} {line}"));
        for (name, before) in images.iter().zip(&before) {
            assert!(bytes_of(name) == *before, "{line} changed {name}");
        }
    }
    assert!(!bench.path("missing.img").exists());
    for line in ["-V", "--version", "--help", "-O list-all", "-R list-all", "-V bogus"] {
        let output = bench.run(&bench.link(), line);
        assert_eq!(output.status.code(), Some(0), "{line}");
        assert!(!output.stdout.is_empty(), "{line}");
    }
    assert!(bench.does("-V").contains("btrfs-progs v"));
}

/// What the real tool does and we do not is refused by its name.
#[test]
fn what_is_not_made_is_named() {
    let bench = Bench::new();
    std::fs::create_dir(bench.path("top")).expect("a directory");
    let image = bench.occupied("w.img", 300);
    let before = fs::read(&image).expect("an image");
    for (line, name) in [
        ("-O quota w.img", "quota"),
        ("-O squota w.img", "squota"),
        ("-O zoned w.img", "zoned"),
        ("-O raid-stripe-tree w.img", "raid-stripe-tree"),
        ("-d raid5 w.img x.img", "RAID5"),
        ("-r top --reflink --compress zstd w.img", "--reflink"),
        ("-r top --inode-flags nodatasum:. w.img", "nodatasum"),
    ] {
        bench.image("x.img", 300);
        let said = bench.fails(&format!("-f {line}"));
        assert!(said.contains(name), "{line}: {said}");
    }
    // Nothing was written.
    assert!(fs::read(&image).expect("an image") == before);
}

/// A volume that cannot be made leaves files and devices as they are, also with `-f`.
#[test]
fn a_refused_volume_changes_nothing() {
    let Some(_judges) = judges::require() else { return };
    let bench = Bench::new();
    fs::create_dir(bench.path("top")).expect("a directory");
    let (image, below) = (bench.occupied("w.img", 300), bench.occupied("below.img", 300));
    let before = fs::read(&image).expect("an image");
    {
        let attached = AttachedImages::new(std::slice::from_ref(&below));
        for words in [
            &["-m", "raid1"][..],
            &["-d", "raid5"],
            &["-d", "raid10"],
            &["-L", "a\nb"],
            &["-n", "12345"],
            &["-s", "12345"],
            &["-b", "2M"],
            &["--device-uuid", "00000000-0000-0000-0000-00000000000g"],
        ] {
            for filled in [&[][..], &["-r", "top"]] {
                for target in ["w.img", attached.devices()[0]] {
                    let mut command = Command::new(bench.link());
                    command.arg("-f").args(words).args(filled).arg(target);
                    let output = command.current_dir(bench.dir.path()).output();
                    let output = output.expect("it starts");
                    assert_eq!(output.status.code(), Some(1), "{words:?} {filled:?} {target}");
                    // That of the device is absolute.
                    let is = fs::read(bench.path(target)).expect("bytes");
                    assert!(is == before, "{words:?} {filled:?} {target}");
                }
            }
        }
    }
    assert!(fs::read(&below).expect("an image") == before);
}
