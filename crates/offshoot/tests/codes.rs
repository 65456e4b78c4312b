//! Every code is unique and documented, and the texts that lead to one are those of the engine.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use offshoot::device::MemoryDevice;
use offshoot::{BlockDevice, Code, CreateOptions, Error, OpenOptions, Volume};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the crate is in crates/")
}

#[test]
fn numbers_and_names_are_unique_and_documented() {
    let numbers: BTreeSet<u16> = Code::ALL.iter().map(|code| code.number()).collect();
    assert_eq!(numbers.len(), Code::ALL.len());
    assert!(numbers.iter().copied().eq(Code::ALL.iter().map(|code| code.number())), "in order");
    let page = fs::read_to_string(root().join("docs/errors.md")).expect("the page is there");
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| `")).collect();
    let ours = Code::ALL.iter();
    let ours = ours.map(|c| format!("| `{}` | {} | {} |", c.name(), c.number(), c.meaning()));
    assert_eq!(rows, ours.collect::<Vec<_>>(), "docs/errors.md");
}

/// The sources of a crate, without what follows a module of tests.
fn sources(folder: &Path, into: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("it can be read").path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if stem.ends_with("tests") {
            continue;
        }
        if path.is_dir() {
            sources(&path, into);
        } else {
            let text = fs::read_to_string(&path).expect("it is text");
            let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
            into.push(text[..end].to_owned());
        }
    }
}

/// The string literals right behind `front`, on the same line or the next one. What is put into one
/// becomes RAID5, which every place accepts.
fn literals<'a>(text: &'a str, front: &'a str) -> impl Iterator<Item = String> + 'a {
    text.match_indices(front).filter_map(move |(at, _)| {
        let rest = text[at + front.len()..].trim_start();
        let rest = rest.strip_prefix("format!(").unwrap_or(rest).trim_start();
        let text = rest.strip_prefix('"')?.split('"').next()?;
        let mut filled = String::new();
        let mut is_outside = true;
        for c in text.chars() {
            match c {
                '{' => filled.push_str("RAID5"),
                '}' => {}
                c if is_outside => filled.push(c),
                _ => {}
            }
            is_outside = if is_outside { c != '{' } else { c == '}' };
        }
        Some(filled)
    })
}

#[test]
fn each_structure_of_the_engine_has_a_code() {
    let errors = ["Error::corrupt(", "Error::corrupt_at("];
    let names = ["Malformed::new(", "take(", "const STRUCTURE: &str =", "const NAME: &str ="];
    let mut seen = BTreeSet::new();
    for name in ["btrfs", "btrfs-format", "vfs", "transfer"] {
        let mut texts = Vec::new();
        sources(&root().join("crates").join(name).join("src"), &mut texts);
        let fronts = if name == "btrfs-format" { &names[..] } else { &errors[..] };
        for text in &texts {
            let found = fronts.iter().flat_map(|front| literals(text, front));
            let views = text.match_indices("view::<").filter_map(|(at, _)| {
                let rest = text[at..].split_once(">(")?.1.trim_start().strip_prefix('"')?;
                rest.split('"').next().map(str::to_owned)
            });
            seen.extend(found.chain(views));
        }
    }
    // The structure is put in where the member is known.
    assert!(seen.remove("RAID5 of RAID5 at byte RAID5"));
    seen.insert("superblock of /dev/sda at byte 65536".to_owned());
    assert!(seen.len() > 30, "{seen:?}");
    seen.retain(|name| Code::of(&Error::corrupt(name, "")) == Code::Corrupt);
    assert!(seen.is_empty(), "these have no code of their own: {seen:#?}");
}

#[test]
fn each_obstacle_of_the_engine_has_a_code() {
    let mut texts = Vec::new();
    sources(&root().join("crates/btrfs/src"), &mut texts);
    let mut seen = BTreeSet::new();
    for text in &texts {
        seen.extend(literals(text, "Error::Unsupported("));
        seen.extend(literals(text, "refuse(").map(|what| format!("writing {what}")));
        // What is named first: `let what = format!(...); return Err(Error::Unsupported(what))`.
        for (at, _) in text.match_indices("Error::Unsupported(what)") {
            let named = text[..at].rfind("let what =").map(|start| &text[start..at]);
            seen.extend(named.into_iter().flat_map(|text| literals(text, "let what =")));
        }
    }
    // The flag and the member are put in where they are named.
    seen.remove("RAID5; finish it with the program that began it");
    seen.remove("writing RAID5");
    seen.remove("writing while RAID5 RAID5");
    for why in ["is missing", "belongs to a seed", "missed commits, and no other member"] {
        seen.insert(format!("writing while /dev/sda {why}"));
    }
    for what in [
        "a volume whose fsid is being changed",
        "a volume that is being converted to a block group tree",
        "a volume whose data checksums are being converted",
        "a volume whose metadata checksums are being converted",
    ] {
        assert!(texts.iter().any(|text| text.contains(&format!("\"{what}\""))), "{what}");
        seen.insert(what.to_owned());
    }
    assert!(seen.len() > 25, "{seen:?}");
    seen.retain(|text| Code::of(&Error::Unsupported(text.clone())) == Code::Unsupported);
    assert!(seen.is_empty(), "these have no code of their own: {seen:#?}");
}

#[test]
fn damaged_volumes_and_missing_members_have_their_codes() {
    let devices = [(); 2].map(|()| Arc::new(MemoryDevice::sparse(256 << 20)));
    let all = || devices.iter().map(|device| device.clone() as Arc<dyn BlockDevice>);
    let volume = Volume::create_on(all().collect(), &CreateOptions::new()).expect("it is made");
    volume.write("/file", vec![0xa5; 1 << 20]).expect("it is written");
    volume.sync().expect("it is durable");
    drop(volume);
    let code = |options: OpenOptions, devices| {
        Code::of(&options.open_devices(devices).err().expect("it does not open"))
    };
    assert_eq!(code(OpenOptions::new(), all().take(1).collect()), Code::Incomplete);
    let degraded = OpenOptions::new().degraded(true);
    assert_eq!(code(degraded.clone().write(true), all().take(1).collect()), Code::MemberMissing);
    assert!(degraded.open_devices(all().take(1).collect()).is_ok());
    let empty = Arc::new(MemoryDevice::sparse(256 << 20));
    assert_eq!(code(OpenOptions::new(), vec![empty]), Code::NoVolume);

    // Data has one copy: one byte of it is changed.
    let mut block = vec![0; 4096];
    for device in &devices {
        for at in (1 << 20..device.size_bytes()).step_by(4096) {
            device.read_at(at, &mut block).expect("memory is read");
            if block.iter().all(|&byte| byte == 0xa5) {
                device.write_at(at, b"?").expect("memory is written");
                break;
            }
        }
    }
    let volume = OpenOptions::new().open_devices(all().collect()).expect("it opens");
    let error = volume.read("/file").expect_err("it is damaged");
    assert_eq!(Code::of(&error), Code::Data, "{error}");
    assert!(error.to_string().starts_with("/file: corrupt data at logical address "), "{error}");
}
