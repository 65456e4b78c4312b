//! Manifests of other programs: what is built from them is the tree that they were made of, by the
//! kernel's mount.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use offshoot_testkit::compare::Aspect;
use offshoot_testkit::fill;
use offshoot_testkit::run::run;
use offshoot_testkit::scratch_dir;

use super::judged::{assert_built, build};
use super::{BuildJudges, does, fails, on_both};

on_both!(manifests_of_bsdtar, manifests_of_netbsd, contents_are_compared, digests_of_fsverity,);

/// What manifests hold: no extended attributes, and nothing of holes.
fn what_manifests_hold(root: &Path) {
    fill::names::fill(&fill::directory(root, "names"));
    fill::names::hard_links(&fill::directory(root, "links"));
    let shapes = fill::directory(root, "shapes");
    fill::shapes::unshared(&shapes);
    // Programs read holes for their digests, and some there have a tebibyte.
    for file in fs::read_dir(&shapes).expect("a directory") {
        let file = file.expect("an entry");
        if file.metadata().expect("a file").len() > 1 << 30 {
            fs::remove_file(file.path()).expect("the file goes");
        }
    }
    fill::special::fill(&fill::directory(root, "special"));
    fill::sync(root);
}

const AT_LEAST: u64 = 350;

/// Builds from the text of a manifest, with the tree that it was made of.
fn through_manifest(judges: &BuildJudges, source: &Path, manifest: &str) {
    let dir = scratch_dir();
    fs::write(dir.path().join("manifest"), manifest).expect("a manifest");
    let named = [&b"mtree:manifest,contents="[..], source.as_os_str().as_encoded_bytes()].concat();
    // The name of a scratch directory is text.
    let named = String::from_utf8(named).expect("text");
    let said = build(dir.path(), &["--from".as_ref(), OsStr::new(&named)]);
    assert_eq!(said, "");
    assert_built(judges, dir.path(), source, AT_LEAST, &[Aspect::Holes, Aspect::Allocation]);
}

fn manifests_of_bsdtar() {
    let Some(judges) = BuildJudges::require() else { return };
    let source = judges.scratch(1024);
    what_manifests_hold(source.path());
    // libarchive has no sockets in this form.
    for options in ["", "all,!flags", "all,!flags,use-set,indent", "!all,type,link"] {
        let words = format!("-cf - --format=mtree --options mtree:{options} -C");
        let words = words.replace(" --options mtree: ", " ");
        let mut args: Vec<&OsStr> = words.split(' ').map(OsStr::new).collect();
        args.extend([source.path().as_os_str(), ".".as_ref()]);
        let manifest = run("bsdtar", &args);
        through_manifest(&judges, source.path(), &manifest);
    }
}

fn manifests_of_netbsd() {
    let Some(judges) = BuildJudges::require() else { return };
    let source = judges.scratch(1024);
    what_manifests_hold(source.path());
    // NetBSD cuts off longer targets.
    for file in fs::read_dir(source.path().join("special")).expect("a directory") {
        let path = file.expect("an entry").path();
        if fs::read_link(&path).is_ok_and(|target| target.as_os_str().len() > 1000) {
            fs::remove_file(path).expect("the link goes");
        }
    }
    let dir = scratch_dir();
    let keys = "type,mode,uid,gid,nlink,size,time,link,device,sha256,rmd160,cksum";
    let args = ["-c", "-k", keys, "-p"].map(OsStr::new);
    let manifest = run("mtree", &[&args[..], &[source.path().as_os_str()]].concat());
    through_manifest(&judges, source.path(), &manifest);
    // The same with paths, at the beginning of lines and at their end. NetBSD itself does not
    // read all names again that it writes.
    fs::remove_dir_all(source.path().join("names")).expect("the names go");
    let manifest = run("mtree", &[&args[..], &[source.path().as_os_str()]].concat());
    fs::write(dir.path().join("m"), manifest).expect("a manifest");
    let path = dir.path().join("m");
    for form in ["-C", "-D"] {
        let args = [form, "-k", keys, "-f"].map(OsStr::new);
        let manifest = run("mtree", &[&args[..], &[path.as_os_str()]].concat());
        through_manifest(&judges, source.path(), &manifest);
    }
}

/// A file that changed since the manifest was made ends the build.
fn contents_are_compared() {
    let dir = scratch_dir();
    let format = super::format_name();
    fs::create_dir(dir.path().join("top")).expect("a directory");
    fs::write(dir.path().join("top/f"), "contents").expect("a file");
    let args = ["-c", "-k", "type,size,mode,uid,gid,sha256", "-p"].map(OsStr::new);
    let top = dir.path().join("top");
    let manifest = run("mtree", &[&args[..], &[top.as_os_str()]].concat());
    fs::write(dir.path().join("m"), manifest).expect("a manifest");
    let line = format!("build v.img --format {format} --from mtree:m,contents=top");
    does(dir.path(), &line);
    fs::remove_file(dir.path().join("v.img")).expect("the image goes");
    fs::write(dir.path().join("top/f"), "changed!").expect("a file");
    let said = fails(dir.path(), &line, 1);
    assert!(said.contains("m: f: its contents have the sha256 "), "{said}");
    assert!(!dir.path().join("v.img").exists());
    fs::remove_file(dir.path().join("top/f")).expect("the file goes");
    let said = fails(dir.path(), &line, 1);
    assert!(said.contains("m: f: its data is not in the directory top"), "{said}");
    // Names of users are not those of the host.
    fs::write(dir.path().join("m"), "f type=file size=0 uname=lisa\n").expect("a manifest");
    let said = fails(dir.path(), &line, 1);
    assert!(said.contains("the number of lisa is not known"), "{said}");
    does(dir.path(), &format!("{line} --owner 5:6"));
}

/// The digests in a manifest of composefs are those that `fsverity digest` computes.
fn digests_of_fsverity() {
    let Some(judges) = BuildJudges::require() else { return };
    let dir = scratch_dir();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("objects")).expect("a directory");
    let mut manifest = "/ 0 40755 2 0 0 0 0.0 - - -\n".to_owned();
    let mut noise = 1_u64;
    // Around one block of data, one block of hashes, and one block of hashes of hashes.
    let sizes =
        [0, 1, 4096, 4097, 64 << 12, 128 << 12, (128 << 12) + 1, ((128 * 128) << 12) + 4097];
    for size in sizes {
        let mut data = Vec::with_capacity(size);
        while data.len() < size {
            noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            data.extend_from_slice(&noise.to_be_bytes());
        }
        data.truncate(size);
        // Holes count as zeros.
        if size > 1 << 20 {
            data[4096..1 << 20].fill(0);
        }
        let object = path("objects").join(size.to_string());
        fs::write(&object, data).expect("a file");
        for algorithm in ["sha256", "sha512"] {
            let args = ["digest", "--compact", "--hash-alg", algorithm].map(OsStr::new);
            let digest = run("fsverity", &[&args[..], &[object.as_os_str()]].concat());
            let digest = digest.trim();
            let line = format!("/{algorithm}-{size} {size} 100644 1 0 0 0 9.1 {size} - {digest}\n");
            manifest.push_str(&line);
        }
    }
    fs::write(path("m"), &manifest).expect("a manifest");
    let format = super::format_name();
    let line = format!("build v.img --force --format {format} --from composefs:m,contents=objects");
    does(dir.path(), &line);
    super::check(&judges, &path("v.img"));
    let mount = judges.mount(&path("v.img"));
    for size in sizes {
        for algorithm in ["sha256", "sha512"] {
            let built = fs::read(mount.path().join(format!("{algorithm}-{size}"))).expect("a file");
            let object = fs::read(path("objects").join(size.to_string())).expect("a file");
            assert!(built == object, "{algorithm} {size}");
        }
    }
    drop(mount);
    // One byte in the middle of the largest file.
    let largest = path("objects").join(sizes[sizes.len() - 1].to_string());
    let mut data = fs::read(&largest).expect("a file");
    data[5_000_000] ^= 1;
    fs::write(&largest, data).expect("a file");
    let said = fails(dir.path(), &line, 1);
    assert!(said.contains("its contents have the fs-verity digest "), "{said}");
}
