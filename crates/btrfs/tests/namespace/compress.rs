//! Data that is compressed when it is written, judged by the kernel and `btrfs check`.

use std::os::unix::fs::FileExt;
use std::path::Path;

use offshoot_btrfs::{Compress, EngineOptions, Filesystem, SubvolumeId};
use offshoot_btrfs_format::compress::Compression;
use offshoot_btrfs_format::file_extent::FileExtentBody;
use offshoot_btrfs_format::inode::inode_flags;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::model::Model;
use offshoot_testkit::model::actor::Actor;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::run;
use offshoot_vfs::{Errno, Fallocate, FileFlags, FileSystem, FileSystemMut, SetAttr, XattrMode};

use crate::common::{AT, NEW, at, judge, open_read_only, open_with, place};
use crate::layout::{flags, for_each_extent};

const PROPERTY: &[u8] = b"btrfs.compression";

fn options(method: &str, is_forced: bool) -> EngineOptions {
    let compress = Compress { method: method.parse().expect("a method"), is_forced };
    EngineOptions { compress: Some(compress), ..EngineOptions::default() }
}

fn open(disks: &Disks, options: &EngineOptions) -> Filesystem {
    open_with(disks, options).filesystem(SubvolumeId::FS).expect("every volume has one")
}

/// The extents of a file: how they are compressed, whether they are inline, and their length on
/// disk.
fn extents(fs: &Filesystem, path: &str) -> Vec<(Compression, bool, u64)> {
    let mut all = Vec::new();
    for_each_extent(fs, at(fs, path), |_, extent| match extent.body {
        FileExtentBody::Inline(data) => all.push((extent.compression, true, data.len() as u64)),
        FileExtentBody::Hole { .. } => {}
        FileExtentBody::Extent { disk_num_bytes, .. } => {
            all.push((extent.compression, false, disk_num_bytes));
        }
    });
    all
}

fn check_data(disks: &Disks) {
    let image = disks.images()[0].to_str().expect("a plain path").to_owned();
    run("btrfs", &["check", "--readonly", "--check-data-csum", &image]);
}

/// Writes files with data of every kind and length, and writes some of it again.
fn fill(fs: &Filesystem, random: &mut Random) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    for len in [1, 900, 2048, 2500, 4096, 4097, 70_000, 131_072, 1_300_000] {
        files.push((format!("text{len}"), random.text(len)));
    }
    files.push(("noise".into(), random.bytes(300_000)));
    files.push((
        "noise-later".into(),
        [random.text(200_000), random.bytes(300_000), random.text(200_000)].concat(),
    ));
    for (name, data) in &mut files {
        let file = fs.create(place(fs.root(), name), &NEW).expect("a file");
        fs.write(file, 0, data, AT).expect("there is room");
        if name != "noise" && data.len() > 100_000 {
            fs.fsync(file).expect("a commit");
            let part = random.text(30_001);
            let offset = data.len() / 3;
            fs.write(file, offset as u64, &part, AT).expect("there is room");
            data[offset..offset + part.len()].copy_from_slice(&part);
        }
    }
    fs.sync().expect("a commit");
    files
}

fn assert_holds(dir: &Path, files: &[(String, Vec<u8>)]) {
    for (name, data) in files {
        assert!(std::fs::read(dir.join(name)).expect("it reads") == *data, "bytes of {name}");
    }
}

/// The kernel and `btrfs restore` read what every method writes.
#[test]
fn the_kernel_reads_what_every_method_makes() {
    let Some(judges) = judges::require() else { return };
    let mut random = Random::new(seed_of_run());
    for method in ["zlib:1", "zlib:9", "lzo", "zstd:-15", "zstd:3", "zstd:15"] {
        let disks = Disks::create(&judges, 1, 256);
        disks.mkfs(&[]);
        println!("{method}");
        let options = options(method, false);
        let fs = open(&disks, &options);
        let mut files = fill(&fs, &mut random);
        let compression = options.compress.expect("one").method.compression();
        for (name, data) in &files {
            let found = extents(&fs, name);
            let on_disk: u64 = found.iter().map(|extent| extent.2).sum();
            let is_compressed = found.iter().any(|extent| extent.0 == compression);
            let flags = flags(&fs, at(&fs, name));
            let is_marked = flags & inode_flags::NOCOMPRESS != 0;
            assert_eq!(is_marked, name == "noise", "{method}: {name}");
            match data.len() {
                _ if name == "noise" => assert!(!is_compressed, "{method}: {name}"),
                // This level saves little.
                _ if method == "zstd:-15" => {}
                // A file of one sector is inline if it is compressed to half a sector.
                0..4097 => assert!(found[0].1, "{method}: {name}"),
                4097 => {}
                _ => assert!(is_compressed && on_disk < data.len() as u64, "{method}: {name}"),
            }
        }
        drop(fs);
        check_data(&disks);
        judge(&disks, files.len() as u64);
        let image = disks.images()[0].to_str().expect("a plain path").to_owned();
        let restored = tempfile::tempdir().expect("a directory");
        run("btrfs", &["restore", &image, restored.path().to_str().expect("a plain path")]);
        assert_holds(restored.path(), &files);
        // The kernel overwrites parts of it, and then we write again.
        let mount = disks.mount("rw,noatime");
        assert_holds(mount.path(), &files);
        for (name, data) in files.iter_mut().filter(|(_, data)| data.len() > 50_000) {
            let file = std::fs::File::options().write(true).open(mount.path().join(name));
            file.expect("it opens").write_all_at(&[5; 5000], 40_000).expect("it writes");
            data[40_000..45_000].fill(5);
        }
        drop(mount);
        let fs = open(&disks, &options);
        for (name, data) in &mut files {
            let size = data.len() as u64 / 2 + 1;
            fs.set_attr(at(&fs, name), &SetAttr { size: Some(size), ..SetAttr::default() }, AT)
                .expect("it is cut");
            data.truncate(data.len() / 2 + 1);
        }
        fs.sync().expect("a commit");
        drop(fs);
        check_data(&disks);
        assert_holds(disks.mount("ro").path(), &files);
    }
}

/// The level reaches the compressor: a higher level makes the same data smaller, and the kernel
/// reads it.
#[test]
fn levels_make_a_difference() {
    let Some(judges) = judges::require() else { return };
    let text = Random::new(11).text(2 << 20);
    for levels in [["zlib:1", "zlib:9"], ["zstd:1", "zstd:15"]] {
        let on_disk = levels.map(|level| {
            let disks = Disks::create(&judges, 1, 256);
            disks.mkfs(&[]);
            let fs = open(&disks, &options(level, false));
            let file = fs.create(place(fs.root(), "file"), &NEW).expect("a file");
            fs.write(file, 0, &text, AT).expect("there is room");
            fs.sync().expect("a commit");
            let on_disk: u64 = extents(&fs, "file").iter().map(|extent| extent.2).sum();
            drop(fs);
            check_data(&disks);
            assert_holds(disks.mount("ro").path(), &[("file".into(), text.clone())]);
            on_disk
        });
        assert!(on_disk[1] < on_disk[0], "{levels:?} make {on_disk:?} bytes");
    }
}

/// New files and directories inherit the property of their directory, as in the kernel. It decides
/// how a file is compressed where the volume has no setting.
#[test]
fn the_property_says_how_files_are_compressed() {
    use Compression as C;

    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let mut random = Random::new(2);
    let text = random.text(200_000);
    let fs = open(&disks, &EngineOptions::default());
    let set = |file, value: &[u8]| fs.set_xattr(file, PROPERTY, value, XattrMode::Set, AT);
    for (dir, value) in [("zlib", "zlib"), ("lzo", "lzo"), ("zstd", "zstd:5"), ("none", "none")] {
        let made = fs.mkdir(place(fs.root(), dir), &NEW).expect("a directory");
        set(made, value.as_bytes()).expect("a property");
        let file = fs.create(place(made, "file"), &NEW).expect("a file");
        let inherited = fs.xattr(file, PROPERTY).ok();
        assert_eq!(inherited.as_deref(), Some(dir.as_bytes()).filter(|_| dir != "none"));
        fs.write(file, 0, &text, AT).expect("there is room");
    }
    let file = fs.create(place(fs.root(), "changed"), &NEW).expect("a file");
    set(file, b"lzo").expect("a property");
    set(file, b"").expect("it goes");
    set(file, b"").expect("there is none");
    assert_eq!(fs.xattr(file, PROPERTY).expect_err("it went").errno(), Errno::NODATA);
    fs.write(file, 0, &text, AT).expect("there is room");
    assert_eq!(set(file, b"gzip").expect_err("no compression").errno(), Errno::INVAL);
    let other = fs.set_xattr(file, b"btrfs.other", b"1", XattrMode::Set, AT);
    assert_eq!(other.expect_err("no property").errno(), Errno::INVAL);
    fs.sync().expect("a commit");
    let first = |path| extents(&fs, path)[0].0;
    let found = ["zlib/file", "lzo/file", "zstd/file", "none/file", "changed"].map(first);
    assert_eq!(found, [C::Zlib, C::Lzo, C::Zstd, C::None, C::None]);
    drop(fs);
    judge(&disks, 9);
    let image = disks.images()[0].to_str().expect("a plain path").to_owned();
    let said = run("btrfs", &["inspect-internal", "dump-super", &image]);
    for feature in ["COMPRESS_LZO", "COMPRESS_ZSTD"] {
        assert!(said.contains(feature), "the volume does not say {feature}: {said}");
    }
    // Files that the kernel makes there are compressed by our property.
    let mount = disks.mount("rw,noatime");
    for dir in ["zlib", "lzo", "zstd", "none"] {
        std::fs::write(mount.path().join(dir).join("kernel"), &text).expect("a file");
    }
    drop(mount);
    let fs = open_read_only(&disks);
    let first = |path| extents(&fs, path)[0].0;
    let found = ["zlib/kernel", "lzo/kernel", "zstd/kernel", "none/kernel"].map(first);
    assert_eq!(found, [C::Zlib, C::Lzo, C::Zstd, C::None]);
}

/// With `force`, files that are marked as not worth it are compressed. Files that are written in
/// place are never compressed.
#[test]
fn force_and_what_no_force_compresses() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 256);
    disks.mkfs(&[]);
    let mut random = Random::new(2);
    let (text, noise) = (random.text(131_072), random.bytes(131_072));
    let both = [&noise[..], &text].concat();
    let mut fs = open(&disks, &options("zstd", false));
    for forced in [false, true] {
        if forced {
            drop(fs);
            fs = open(&disks, &options("zstd", true));
        }
        let file = fs.create(place(fs.root(), &format!("both{forced}")), &NEW).expect("a file");
        fs.write(file, 0, &both, AT).expect("there is room");
        fs.fsync(file).expect("a commit");
        // Again, after the result of the first write is known.
        fs.write(file, both.len() as u64, &text, AT).expect("there is room");
        let file = fs.create(place(fs.root(), &format!("kept{forced}")), &NEW).expect("a file");
        fs.fallocate(file, Fallocate::Allocate { keeps_size: false }, 0, 131_072, AT)
            .expect("room");
        fs.write(file, 0, &text, AT).expect("there is room");
        let file = fs.create(place(fs.root(), &format!("nocow{forced}")), &NEW).expect("a file");
        fs.set_flags(file, FileFlags::NODATACOW, AT).expect("it is empty");
        fs.write(file, 0, &text, AT).expect("there is room");
        fs.sync().expect("a commit");
    }
    let kinds = |path: &str| {
        let all = extents(&fs, path).into_iter().map(|extent| extent.0 == Compression::Zstd);
        all.collect::<Vec<_>>()
    };
    assert_eq!(kinds("bothfalse"), [false; 3]);
    assert_eq!(kinds("bothtrue"), [false, true, true]);
    for in_place in ["keptfalse", "kepttrue", "nocowfalse", "nocowtrue"] {
        assert_eq!(kinds(in_place), [false], "{in_place}");
    }
    drop(fs);
    judge(&disks, 6);
    check_data(&disks);
}

/// Data that does not become smaller is written 8 MiB at a time, and gets extents of that length
/// where there is room.
#[test]
fn what_does_not_shrink_has_long_extents() {
    let Some(judges) = judges::require() else { return };
    let noise = Random::new(12).bytes(24 << 20);
    let [plain, tried] = [EngineOptions::default(), options("zstd:1", true)].map(|options| {
        let disks = Disks::create(&judges, 1, 1024);
        disks.mkfs(&[]);
        let fs = open(&disks, &options);
        let file = fs.create(place(fs.root(), "noise"), &NEW).expect("a file");
        fs.write(file, 0, &noise, AT).expect("there is room");
        fs.sync().expect("a commit");
        let found = extents(&fs, "noise");
        drop(fs);
        check_data(&disks);
        assert_holds(disks.mount("ro").path(), &[("noise".into(), noise.clone())]);
        found
    });
    assert!(tried.iter().all(|extent| extent.0 == Compression::None), "{tried:?}");
    // Free space may be in pieces, in both volumes.
    assert!(tried.len() < 3 + plain.len(), "{tried:?}, and without compression {plain:?}");
}

/// Random operations while everything is compressed that can be.
#[test]
fn random_operations_on_compressed_files() {
    let Some(judges) = judges::require() else { return };
    let seed = seed_of_run();
    let small_nodes = &["-n", "4k", "-O", "^no-holes"][..];
    for (method, mkfs) in
        [("lzo", &["-O", "^no-holes"][..]), ("zstd:1", &[]), ("zlib:1", small_nodes)]
    {
        let disks = Disks::create(&judges, 1, 512);
        disks.mkfs(mkfs);
        let fs = open(&disks, &options(method, true));
        let model = Model::new(&fs.attr(fs.root()).expect("attributes"));
        model.compress_with(method.split(':').next().expect("a name"));
        std::thread::scope(|scope| {
            for number in 0..2 {
                let (fs, model) = (&fs, &model);
                scope.spawn(move || Actor::new(fs, model, number, seed, AT).act(3000));
            }
        });
        fs.sync().expect("a commit");
        crate::model::compare(&fs, &model);
        drop(fs);
        check_data(&disks);
        judge(&disks, 10);
    }
}

/// Free space is in small pieces. Compressed extents go where they fit, and data that fits nowhere
/// compressed is not compressed.
#[test]
fn a_fragmented_volume_is_filled_with_compressed_files() {
    let Some(judges) = judges::require() else { return };
    let disks = Disks::create(&judges, 1, 64);
    disks.mkfs(&["-m", "single"]);
    let mut random = Random::new(seed_of_run());
    let fs = open(&disks, &options("lzo", true));
    // Most of the space is not needed.
    let most = fs.create(place(fs.root(), "most"), &NEW).expect("a file");
    fs.fallocate(most, Fallocate::Allocate { keeps_size: true }, 0, 32 << 20, AT).expect("room");
    let mut files = Vec::new();
    let mut fill = |prefix: &str, len: usize, files: &mut Vec<(String, Vec<u8>)>| {
        for number in 0.. {
            let (name, data) = (format!("{prefix}{number}"), random.text(len));
            let file = fs.create(place(fs.root(), &name), &NEW).expect("a file");
            match fs.write_direct(file, 0, &data, AT) {
                Ok(()) => files.push((name, data)),
                Err(error) => {
                    assert_eq!(error.errno(), Errno::NOSPC, "{error}");
                    fs.unlink(place(fs.root(), &name), AT).expect("it goes");
                    break;
                }
            }
        }
    };
    fill("small", 100_000, &mut files);
    let mut number = 0;
    files.retain(|(name, _)| {
        number += 1;
        let stays = number % 2 == 0;
        if !stays {
            fs.unlink(place(fs.root(), name), AT).expect("it goes");
        }
        stays
    });
    fs.sync().expect("a commit");
    let before = files.len();
    fill("large", 700_000, &mut files);
    assert!(before > 20 && files.len() > before, "{before} files, then {}", files.len());
    fs.sync().expect("a commit");
    drop(fs);
    judge(&disks, files.len() as u64);
    check_data(&disks);
    assert_holds(disks.mount("ro").path(), &files);
}
